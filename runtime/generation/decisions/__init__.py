"""Decisions: the probabilities of given options, computed with the parts that generate."""
