"""The `pilotlight` command: one file per command, each error one sentence that says what to do."""
