"""Helpers for every process, such as SQLite's thread, atomic files, signals and logs."""
