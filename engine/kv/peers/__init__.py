"""Transfers of KV blocks, by name, between the tiers of two engine hosts, while one computes them."""
