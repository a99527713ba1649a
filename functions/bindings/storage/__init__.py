"""Bindings that keep data: KV, D1, R2."""
