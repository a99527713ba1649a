"""Layers that keep a state of a sequence: short convolutions, delta rules, state spaces."""
