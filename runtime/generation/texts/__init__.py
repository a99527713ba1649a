"""Requests for a vector or scores of each text. Nothing is generated."""
