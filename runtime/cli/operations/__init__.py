"""Commands for whoever runs a network: backups, restores, and what is wrong with a machine."""
