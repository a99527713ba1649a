"""Header names, which headers end at a hop, and the signature by which a site knows that a request came through one of its routers.

The signature is HMAC-SHA256 over time, method, path and request id with the network's shared secret; a site rejects one older than a minute.
"""

import hashlib
import hmac
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

SESSION_AFFINITY = "x-session-affinity"
REQUEST_ID = "x-request-id"
ROUTE = "x-pilotlight-route"  # router -> client: which site answered and why
SITE = "x-pilotlight-site"  # site -> router, client: who answered
HOP = "x-pilotlight-hop"  # router -> site: signature
CLIENT_ADDRESS = "cf-connecting-ip"  # router, site -> function: the platform's name for it
CLIENT_ORIGIN = "x-pilotlight-origin"  # router -> site, for a function: scheme and host as its client has named them
CLIENT_GEO = "x-client-geo"  # router -> site: latitude,longitude of the client
HOPS = "x-pilotlight-hops"  # router -> router: how many routers the request has passed
PATIENCE = "x-pilotlight-patience"  # router -> site: with a queue longer than so many ms, decline
PREFIXES = "x-pilotlight-prefixes"  # router -> site: short digests of the conversation's beginnings (wire/prefixes.py)
QUEUE = "x-pilotlight-queue"  # site -> router: that it declines, and how many tokens its queue has
REFUSAL = "x-pilotlight-refusal"  # site -> router: why the site, and not the request, is at fault, in one of REFUSALS; no function can set it
OURS = "x-pilotlight-"  # a client may not send these: the router drops them

# The words of errors.py that another site would not say, and two about the hop itself: this router's signature, or one of the two clocks, is wrong.
REFUSALS = frozenset({"draining", "overloaded", "engine_error", "model_load_failed", "signature", "clock"})

HOP_SECRET_ENV = "PILOTLIGHT_HOP_SECRET"
HOP_MAX_AGE_S = 60.0

# RFC 9110 section 7.6.1, and proxy-* of RFC 9110 section 11.7
HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip

_DROPPED = HOP_BY_HOP | {"host", "content-length"}


def forwardable(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that go on to the next hop: neither hop-by-hop, nor named by `connection`, nor length, host or ours. Names lower case."""
    kept = []
    named = ""
    for name, value in headers:
        name = name.lower()
        if name not in _DROPPED and not name.startswith(OURS):
            kept.append((name, value))
        elif name == "connection":
            named += value + ","
    if named:
        dropped = {token.strip().lower() for token in named.split(",")}
        kept = [pair for pair in kept if pair[0] not in dropped]
    return kept


def sign_hop(secret: str, now_s: float, method: str, path: str, request_id: str) -> str:
    stamp = str(int(now_s))
    return f"{stamp}.{_mac(secret, stamp, method, path, request_id)}"


def hop_is_genuine(signature: str, secret: str, now_s: float, method: str, path: str, request_id: str) -> bool:
    stamp, _, mac = signature.partition(".")
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) < 20 and mac.isascii()):
        return False
    fresh = abs(now_s - int(stamp)) <= HOP_MAX_AGE_S
    return hmac.compare_digest(mac, _mac(secret, stamp, method, path, request_id)) and fresh


def age_of_hop(signature: str, now_s: float) -> float | None:
    """By its own stamp, genuine or not; negative: it comes from the future. None: it is no signature."""
    stamp = signature.partition(".")[0]
    return now_s - int(stamp) if stamp.isascii() and stamp.isdigit() and len(stamp) < 20 else None


def _mac(secret: str, stamp: str, method: str, path: str, request_id: str) -> str:
    inner, outer = _halves(secret)
    inner, outer = inner.copy(), outer.copy()
    inner.update(f"{stamp}\n{method}\n{path}\n{request_id}".encode())
    outer.update(inner.digest())
    mac: str = outer.hexdigest()
    return mac


@lru_cache(16)
def _halves(secret: str) -> tuple[Any, Any]:
    """RFC 2104's inner and outer hash, with the key in them already: OpenSSL sets one up anew for 8 us, which was most of a signature."""
    key = secret.encode()
    key = (hashlib.sha256(key).digest() if len(key) > 64 else key).ljust(64, b"\0")
    return hashlib.sha256(bytes(byte ^ 0x36 for byte in key)), hashlib.sha256(bytes(byte ^ 0x5C for byte in key))
