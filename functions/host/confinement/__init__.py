"""Tiers of isolation, and how a process enters them."""
