"""Deltas as the objects and events of a dialect."""
