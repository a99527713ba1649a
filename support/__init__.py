"""Helpers that every process needs, such as SQLite's thread, whole files, signals and credentials."""
