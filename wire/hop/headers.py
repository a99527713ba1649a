"""Header names, hop-by-hop headers, and the signature by which a site recognises routers."""

import hashlib
import hmac
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

SESSION_AFFINITY = "x-session-affinity"
REQUEST_ID = "x-request-id"
ROUTE = "x-pilotlight-route"  # router -> client: which site answered and why; site -> client: which of its hosts computed the prompt
SITE = "x-pilotlight-site"  # site -> router, client: the site that answered
HOP = "x-pilotlight-hop"  # router -> site: signature
CLIENT_ADDRESS = "cf-connecting-ip"  # router, site -> function: the platform's name for it
CLIENT_ORIGIN = "x-pilotlight-origin"  # router -> site, for a function: scheme and host as its client has named them
OWN_HOST = "x-pilotlight-own-host"  # router -> site, for a function: its client has named a host of the function, which has no prefix there
CLIENT_GEO = "x-client-geo"  # router -> site: latitude,longitude of the client
ACCOUNT = "x-pilotlight-account"  # router -> site: the account of the request's key, if the router knows it
HOPS = "x-pilotlight-hops"  # router -> router: how many routers the request has passed
MAX_QUEUE_WAIT = "x-pilotlight-patience"  # router -> site: with a queue longer than so many ms, decline
PREFIXES = (
    "x-pilotlight-prefixes"  # router -> site: short digests of the conversation's beginnings (wire/hop/prefixes.py)
)
QUEUE = "x-pilotlight-queue"  # site -> router: that it declines, and how many tokens its queue has
CLOCK = "x-pilotlight-clock"  # site -> router: the site's time, signed, if it does not accept a signature's time
REFUSAL = "x-pilotlight-refusal"  # site -> router: why the site, and not the request, is at fault, in one of REFUSALS; no function can set it
IGNORED = "x-ignored-fields"  # site -> client: fields of the body that were ignored
OURS = "x-pilotlight-"  # a client may not send these: the router drops them

# The words of errors.py that another site would not say, and two about the hop itself: this router's signature, or one of the two clocks, is wrong.
REFUSALS = frozenset(
    {"draining", "overloaded", "engine_error", "model_load_failed", "misdirected_request", "signature", "clock"}
)
# For refused connections too: the client may be a router, which then tries another site.
OVERLOADED = ((REFUSAL, "overloaded"),)

HOP_SECRET_ENV = "PILOTLIGHT_HOP_SECRET"
DEPLOY_TOKEN_ENV = "PILOTLIGHT_DEPLOY_TOKEN"
HOP_MAX_AGE_S = 60.0
FOR_ROUTERS = ""  # in place of a site's name

# RFC 9110 section 7.6.1, and proxy-* of RFC 9110 section 11.7
HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip

_DROPPED = HOP_BY_HOP | {"host", "content-length"}


def forwardable(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers to forward; names are lower case.

    Left out are hop-by-hop headers, those that `connection` names, length, host, and ours.
    """
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


class Hop(NamedTuple):
    """The parts of a request that a signature covers.
    Messages after a handshake, such as a WebSocket's, are not covered: TLS between router and site protects them."""

    method: str
    path: str  # decoded: a proxy in between may spell the same path otherwise
    request_id: str
    site: str  # the recipient; empty for the router
    query: str = ""


def signing(secret: str) -> str:
    """Return the secret that signs: the first one, if a network has two during a change.

    All are accepted.
    """
    return secret.partition(",")[0]


def lasting(secret: str) -> str:
    """Return the secret for tenants' salts and engine hosts: the last one.

    It changes when the one before it is removed.
    """
    return secret.rpartition(",")[2]


NO_BODY = hashlib.sha256().hexdigest()


def sign_hop(secret: str, now_s: float, hop: Hop, body: bytes = b"") -> str:
    """Return STAMP.DIGEST.MAC.SITE.
    The digest of the body is included, so that everything except the body can be checked before the body arrives."""
    stamp, digest = str(int(now_s)), hashlib.sha256(body).hexdigest() if body else NO_BODY
    return f"{stamp}.{digest}.{_mac(signing(secret), stamp, digest, hop)}.{hop.site}"


def signed_body(signature: str, secret: str, now_s: float, hop: Hop) -> str | None:
    """Return the digest of the signed body; None if the signature is forged, too old, or too new."""
    stamp, digest, mac, site = (signature.split(".", 3) + [""] * 3)[:4]
    if not (_is_stamp(stamp) and signature.isascii() and site == hop.site):
        return None
    is_genuine = any(hmac.compare_digest(mac, _mac(each, stamp, digest, hop)) for each in secret.split(","))
    return digest if is_genuine and abs(now_s - int(stamp)) <= HOP_MAX_AGE_S else None


def hop_is_genuine(signature: str, secret: str, now_s: float, hop: Hop) -> bool:
    """Tell whether a hop is genuine in all but its body."""
    return signed_body(signature, secret, now_s, hop) is not None


def site_of_hop(signature: str) -> str:
    """Return the site that a signature names."""
    return signature.split(".", 3)[-1] if signature.count(".") >= 3 else ""


def age_of_hop(signature: str, now_s: float) -> float | None:
    """Return a signature's age in seconds by its own stamp, genuine or not.

    It is negative for a stamp in the future, and None without a stamp.
    """
    stamp = signature.partition(".")[0]
    return now_s - int(stamp) if _is_stamp(stamp) else None


def tell_clock(secret: str, now_s: float, site: str, request_id: str) -> str:
    """Return STAMP.MAC, with which a router signs for this site although their clocks differ.
    The request's id binds it to this answer."""
    stamp = str(int(now_s))
    return f"{stamp}.{_mac(signing(secret), stamp, CLOCK, Hop('', '', request_id, site))}"


def told_clock(value: str, secret: str, site: str, request_id: str) -> float | None:
    """Return the site's time in seconds since the epoch; None if the value was not signed with the secret."""
    stamp, _, mac = value.partition(".")
    if not (_is_stamp(stamp) and mac.isascii()):
        return None
    asked = Hop("", "", request_id, site)
    is_genuine = any(hmac.compare_digest(mac, _mac(each, stamp, CLOCK, asked)) for each in secret.split(","))
    return float(stamp) if is_genuine else None


def _is_stamp(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _mac(secret: str, stamp: str, digest: str, hop: Hop) -> str:
    # The path comes last: decoded, it may hold line ends, and nothing else can.
    mac = _keyed(secret).copy()
    mac.update(f"{stamp}\n{digest}\n{hop.site}\n{hop.method}\n{hop.request_id}\n{hop.query}\n{hop.path}".encode())
    return mac.hexdigest()


@lru_cache(16)  # a new one takes 4 us more than a copy
def _keyed(secret: str) -> hmac.HMAC:
    return hmac.new(secret.encode(), digestmod="sha256")
