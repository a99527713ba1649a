"""Verify attention is decode attention with more rows."""

from kernels.triton.decode_attention import attend as verify_attention

__all__ = ["verify_attention"]
