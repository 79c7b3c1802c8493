"""The local cloud: Compute Engine, TPU VMs, Cloud Storage and a Hub on loopback, for rehearsal and tests."""
