"""Decisions: typed questions about a state, in the dialects that have them."""
