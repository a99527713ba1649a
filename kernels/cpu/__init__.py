"""A small C library for CPUs, compiled on the machine that runs it, with its operations on tensors."""
