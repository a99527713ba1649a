"""Responses that outlive their request: the ASGI application, and its storage."""
