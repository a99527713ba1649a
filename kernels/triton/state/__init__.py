"""Triton forms of kernels/state."""
