"""Speculative decoding: drafters, the number of drafts that pays off, and acceptance rates."""
