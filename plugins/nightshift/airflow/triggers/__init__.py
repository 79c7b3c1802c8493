"""What waits in the triggerer, so that waiting costs no worker slot."""
