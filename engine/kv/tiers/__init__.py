"""The host and disk tiers of the KV cache."""
