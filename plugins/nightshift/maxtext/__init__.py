"""Every MaxText module, flag and log pattern: what changes when MaxText is upgraded changes here."""
