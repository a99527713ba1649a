"""Commands for operators: backup, restore and diagnosis of a machine."""
