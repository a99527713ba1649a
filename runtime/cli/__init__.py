"""The `pilotlight` command: one file per command; each error is one sentence with its correction."""
