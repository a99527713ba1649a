"""Clients, scenarios and records: how fast, how steady, against whom.

Talks HTTP; imports kernels/ and policies, never a server's insides."""
