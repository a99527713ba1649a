"""Triton forms of kernels/elementwise."""
