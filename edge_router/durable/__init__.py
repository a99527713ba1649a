"""Streams that can be read again."""
