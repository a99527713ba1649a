"""Weights from files to tensors."""
