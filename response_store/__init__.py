"""Stored responses, which outlive their requests: the ASGI application, and its storage."""
