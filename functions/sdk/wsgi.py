"""`import wsgi`, as older functions have it: the module is `workers.wsgi`."""

from workers.wsgi import build_environ, fetch

__all__ = ["build_environ", "fetch"]
