"""The VMs of the local cloud: a private view of this machine each, with an SSH server."""
