"""Processes in which functions run: confinement, forks and limits."""
