"""Weights, from files to tensors: checkpoints, bundles, loaders and the storage formats of matrices."""
