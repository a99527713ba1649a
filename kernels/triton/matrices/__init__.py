"""Triton forms of kernels/matrices."""
