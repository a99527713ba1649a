"""Norms, rotations, activations and cache writes."""
