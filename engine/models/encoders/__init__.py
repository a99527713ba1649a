"""Bidirectional models: their texts are computed whole, and nothing is cached."""
