"""Packages and Python interpreters that functions require."""
