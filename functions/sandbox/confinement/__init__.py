"""Isolation tiers, and how a process enters them."""
