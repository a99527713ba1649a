"""WebSockets inside a function."""
