"""Faults injected into a network of real processes.

They affect members, the links between them, their limits, their files, and their assumptions about each other.
"""
