"""Check the headers of a function's response before the site sends them.

The function's process is not trusted to do so. Names become lower case; names and values that RFC 9110 forbids are refused; headers that only a site
or a connection may set are dropped.
"""

import re
from collections.abc import Iterable
from typing import Any

from pilotlight.functions.channel.failure import Failure
from pilotlight.wire.hop.headers import HOP_BY_HOP, OURS

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_FIELD_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
OF_THE_ORIGIN = frozenset(
    {"clear-site-data", "service-worker-allowed"}
)  # headers that affect all functions under one host name


def checked_headers(pairs: Iterable[Any]) -> list[tuple[str, str]]:
    """Return the checked headers of a function's response.
    Raises Failure if one is invalid; TypeError or ValueError if they are not pairs."""
    kept: list[tuple[str, str]] = []
    length: str | None = None
    for name, value in pairs:
        name, value = str(name).lower(), str(value).strip(" \t")
        if not _TOKEN.fullmatch(name) or not _FIELD_VALUE.fullmatch(value):
            sentence = f"the function's response has a header that HTTP does not allow: {f'{name}: {value}'[:200]!r}"
            raise Failure(sentence, code="wrong_type")
        if name == "content-length":
            if not (value.isascii() and value.isdigit()) or length not in (None, value):
                raise Failure(
                    f"the function's response has an invalid content-length: {value[:200]!r}", code="wrong_type"
                )
            if length is not None:
                continue
            length = value
        if name not in HOP_BY_HOP and not name.startswith(OURS):
            kept.append((name, value))
    return kept


def confined_headers(pairs: Iterable[tuple[str, str]], prefix: str) -> list[tuple[str, str]]:
    """Return the headers of a function that shares its host with others, at the path `prefix`.
    Cookies are limited to that path, and headers that affect the whole origin are dropped."""
    return [
        (name, _confined_cookie(value, prefix) if name == "set-cookie" else value)
        for name, value in pairs
        if name not in OF_THE_ORIGIN
    ]


def _confined_cookie(cookie: str, prefix: str) -> str:
    pair, *attributes = cookie.split(";")
    path, kept = "", [pair]
    for attribute in attributes:
        name, _, value = attribute.partition("=")
        if name.strip(" \t").lower() == "path":
            path = value.strip(" \t")  # of several Path attributes the last one counts (RFC 6265 section 5.3)
        else:
            kept.append(attribute)
    if path != prefix and not path.startswith(f"{prefix}/"):
        path = prefix + path.rstrip("/") if path.startswith("/") else prefix
    return ";".join([*kept, f" Path={path}"])
