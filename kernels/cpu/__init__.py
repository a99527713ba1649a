"""A small C library for CPUs, compiled on the machine that runs it, and its operations on tensors."""
