"""Formats of tool calls, one per file."""
