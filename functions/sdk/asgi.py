"""`import asgi`, as older functions have it: the module is `workers.asgi`."""

from workers.asgi import fetch, request_to_scope, run_in_background

__all__ = ["fetch", "request_to_scope", "run_in_background"]
