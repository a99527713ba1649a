"""Layers that keep a recurrent state: short convolutions, delta rules, state spaces."""
