"""Stand-in for MaxText; see localcloud_stand_in."""
