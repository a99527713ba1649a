"""Helpers that every process needs: a thread for SQLite, whole files, counters in mapped memory, signals, forms, credentials."""
