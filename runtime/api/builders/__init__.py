"""Builders that render an answer's deltas as the objects and events of a dialect."""
