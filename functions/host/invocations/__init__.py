"""Invocations of functions: records in SQLite, sent to functions that consume them."""
