"""What runs on a TPU VM and how one is got: machine types, request bodies, errors, prices, the lease."""
