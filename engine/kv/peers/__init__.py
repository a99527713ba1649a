"""Transfers of blocks from one engine host's tier to another's, by name, while they are computed."""
