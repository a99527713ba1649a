"""Packed models from web servers: what a model consists of, where fetched ones lie, how the missing chunks come."""
