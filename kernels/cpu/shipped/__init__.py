"""Compiled C libraries in a platform wheel, one per level of x86-64: users need no compiler."""
