"""Every MaxText module, flag, environment variable and log pattern: what changes on an upgrade is here."""
