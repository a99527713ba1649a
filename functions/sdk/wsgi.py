"""`import wsgi`, the name that older functions use for `workers.wsgi`."""

from workers.wsgi import Options, build_environ, fetch

__all__ = ["Options", "build_environ", "fetch"]
