"""Durable Objects inside an isolate."""
