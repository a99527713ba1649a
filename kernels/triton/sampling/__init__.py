"""Triton forms of kernels/sampling."""
