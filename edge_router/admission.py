"""Admission: which requests are taken at all, whatever their body says, and which have to wait for their tenant's turn.

Knows heads, keys and limits; refuses to know sites.
"""

import re
from contextlib import AbstractContextManager

from edge_router.limits import TenantLimits
from edge_router.request import Head
from wire.credentials import Access
from wire.errors import ApiError

MODEL_LISTS = ("/v1/models", "/ai/v1/models")

_PLAIN_TARGET = re.compile(r"[\x21-\x7e]+")


class AdmissionFilter:
    def __init__(self, access: Access, limits: TenantLimits) -> None:
        self.access = access
        self.limits = limits
        self.is_draining = False

    def admit(self, head: Head, address: str) -> AbstractContextManager[None]:
        """Return a scope for the time that the request is at work. Raises ApiError."""
        self.check(head)
        return self.limits.admitted(head, address)

    def check(self, head: Head) -> None:
        """Raises ApiError."""
        if self.is_draining:
            raise ApiError("draining", "the router is shutting down: send the request again", retry_after_s=1)
        if not head.is_for_function:
            self.access.check_client(head.header("authorization"))
        if head.path in MODEL_LISTS and head.method not in ("GET", "HEAD", "OPTIONS"):
            raise ApiError("method_not_allowed", f"{head.path[:200]} does not take {head.method}: GET lists the models")
        if ".." in head.path and ".." in head.path.split("/"):
            raise ApiError("not_found", "a path must not contain '..'")
        if not _PLAIN_TARGET.fullmatch(head.target):
            raise ApiError("invalid_request", "a path must be printable ASCII: encode everything else as %XX")
