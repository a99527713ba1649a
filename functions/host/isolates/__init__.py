"""Isolates: the processes in which functions run."""
