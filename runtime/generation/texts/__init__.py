"""Requests whose answer is a vector or a score of each of their texts: nothing is generated."""
