"""The formats of tool calls, one per file."""
