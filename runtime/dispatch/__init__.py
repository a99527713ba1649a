"""Which engine host computes a sequence, and how it moves to another one."""
