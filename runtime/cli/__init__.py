"""The `pilotlight` command: one file per command. An error is one sentence with the change to make."""
