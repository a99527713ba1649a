"""Decisions: the probabilities of given options, computed by the same parts that generate answers."""
