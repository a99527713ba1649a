"""Commands for operators: backup and restore of a machine's state, and its diagnosis."""
