"""The remote-job protocol: an agent file on the VM and the SSH client that talks to it."""
