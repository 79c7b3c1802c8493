"""Connections turned into clients: Compute Engine, Cloud Storage, SSH, the Hub."""
