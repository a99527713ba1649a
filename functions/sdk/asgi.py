"""`import asgi`, the name that older functions use for `workers.asgi`."""

from workers.asgi import Options, fetch, request_to_scope, run_in_background

__all__ = ["Options", "fetch", "request_to_scope", "run_in_background"]
