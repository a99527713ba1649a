"""Joining of a machine to a network: the network's folder with its authority, tokens and secret."""
