"""Decisions: the probabilities of answers, by the parts that generate."""
