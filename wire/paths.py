"""The paths of the API as clients write them."""

from typing import Any

API_PATHS = ("/v1/", "/ai/v1/", "/client/v4/", "/api/")  # prefixes of the API's paths


def drop_trailing_slash(scope: Any) -> None:
    """Ignore a slash at the end of an API path, which clients add to a base URL.
    A redirect would turn a POST into a GET."""
    path = scope.get("path", "")  # a lifespan has none
    if path.endswith("/") and path.startswith(API_PATHS):
        scope["path"] = path[:-1]
        if "raw_path" in scope:
            scope["raw_path"] = scope["raw_path"].removesuffix(b"/")
