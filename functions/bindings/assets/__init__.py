"""Static assets of functions."""
