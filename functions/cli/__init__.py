"""The command line's commands for functions."""
