"""Invocations of functions: their records in SQLite, and their delivery to tail consumers."""
