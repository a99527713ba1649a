"""Triton forms of kernels/attention."""
