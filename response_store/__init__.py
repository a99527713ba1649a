"""Responses that outlive their request: the ASGI application, and where they are kept."""
