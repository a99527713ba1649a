"""The cache of keys and values: its memory, tiers and index."""
