"""The commands for functions of the command line."""
