"""`import wsgi`, as older functions have it: the module is `workers.wsgi`."""

from workers.wsgi import Options, build_environ, fetch

__all__ = ["Options", "build_environ", "fetch"]
