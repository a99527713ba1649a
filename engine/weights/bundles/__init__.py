"""Bundles: a model's tensors in one file."""
