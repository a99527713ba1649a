"""The KV cache: its memory, tiers and index."""
