"""Bundles: all tensors of a model in one file."""
