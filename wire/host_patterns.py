"""Patterns of host and path of a function, in the form of Cloudflare's routes.

Examples are `shop.example/*`, `*.shop.example/api/*` and, for a custom domain, the host alone.

https://developers.cloudflare.com/workers/configuration/routing/routes/: `*` is at a host's start and at a path's end, and the most specific of
several matching patterns counts.
"""

import re
from typing import NamedTuple

_HOST = re.compile(r"(?:\*\.?)?[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)*")


class HostPattern(NamedTuple):
    host: str  # host name without the wildcard
    has_subdomains: bool
    has_apex: bool  # the pattern includes the host itself
    path: str
    is_prefix: bool  # the pattern includes longer paths

    def takes_path(self, path: str) -> bool:
        return path.startswith(self.path) if self.is_prefix else path == self.path

    @property
    def rank(self) -> tuple[bool, int, bool, int]:
        """Return a key that sorts the more specific pattern first.

        Hosts come before wildcards, long patterns before short ones, paths before prefixes.
        """
        return self.has_subdomains, -len(self.host), self.is_prefix, -len(self.path)


def parse_pattern(text: str, *, is_custom_domain: bool = False) -> HostPattern:
    """Parse a pattern. Raises ValueError with a message for the author."""
    plain = re.sub(r"^https?://", "", text.strip())
    host, slash, path = plain.partition("/")
    host = host.lower()
    if not _HOST.fullmatch(host) or len(host) > 253:
        raise ValueError(
            f"{text[:200]!r} begins with no host name such as shop.example or *.shop.example, without a port"
        )
    if is_custom_domain:
        if slash or host.startswith("*"):
            raise ValueError(
                f"{text[:200]!r} is a custom domain, so it is a host name alone, without * and without a path"
            )
        return HostPattern(host, False, True, "/", True)
    path = f"/{path}"
    if "*" in path[:-1] or "?" in path:
        raise ValueError(f"{text[:200]!r}: a path may have * only at its end, and has no query")
    is_prefix = path.endswith("*")
    return HostPattern(
        host.removeprefix("*").removeprefix("."),
        host.startswith("*"),
        not host.startswith("*."),
        path.removesuffix("*"),
        is_prefix,
    )


def covers(allowed: HostPattern, wanted: HostPattern) -> bool:
    """Tell whether every host of the pattern `wanted` is a host of `allowed`."""
    if allowed.has_subdomains and wanted.host.endswith(f".{allowed.host}"):
        return True
    same = wanted.host == allowed.host
    return same and (allowed.has_subdomains or not wanted.has_subdomains) and (allowed.has_apex or not wanted.has_apex)
