"""Packages and interpreters that functions ask for."""
