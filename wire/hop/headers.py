"""Header names, hop-by-hop headers, and the signature by which a site recognises routers."""

import hashlib
import hmac
from collections.abc import Iterable
from functools import lru_cache

import msgspec

SESSION_AFFINITY = "x-session-affinity"
REQUEST_ID = "x-request-id"
# router -> client: which site answered and why; site -> client: which host of the site computed the prompt
ROUTE = "x-pilotlight-route"
SITE = "x-pilotlight-site"  # site -> router, client: the site that answered
HOP = "x-pilotlight-hop"  # router -> site: signature
CLIENT_ADDRESS = "cf-connecting-ip"  # router, site -> function; Cloudflare's name
CLIENT_ORIGIN = "x-pilotlight-origin"  # router -> site, for a function: scheme and host of the client's request
OWN_HOST = "x-pilotlight-own-host"  # router -> site, for a function: the client used a host name of the function, where paths have no prefix
CLIENT_GEO = "x-client-geo"  # router -> site: latitude,longitude of the client
ACCOUNT = "x-pilotlight-account"  # router -> site: the account of the request's key, if the router knows it
HOPS = "x-pilotlight-hops"  # router -> router: how many routers the request has passed
MAX_QUEUE_WAIT = "x-pilotlight-patience"  # router -> site: decline if the queue is longer than this many ms
WAITED = "x-pilotlight-waited"  # router -> site: ms that the request has waited at sites that failed or declined
# router -> site: short digests of the conversation's beginnings (wire/hop/prefixes.py)
PREFIXES = "x-pilotlight-prefixes"
QUEUE = "x-pilotlight-queue"  # site -> router: the site declines; the value is its queue in tokens
CLOCK = "x-pilotlight-clock"  # site -> router: the signed time of a site that refuses a signature because of its time
REFUSAL = "x-pilotlight-refusal"  # site -> router: why the site is at fault and not the request, one of REFUSALS; functions cannot set it
IGNORED = "x-ignored-fields"  # site -> client: fields of the body that were ignored
OURS = "x-pilotlight-"  # prefix of headers that the router drops if a client sends them

# Error codes (errors.py) for which another site may succeed, and two for the hop itself: a wrong signature of this router, or a wrong clock.
REFUSALS = frozenset(
    {"draining", "overloaded", "engine_error", "model_load_failed", "misdirected_request", "signature", "clock"}
)
# Also added to refused connections, because the client may be a router, which then tries another site.
OVERLOADED = ((REFUSAL, "overloaded"),)

HOP_SECRET_ENV = "PILOTLIGHT_HOP_SECRET"
DEPLOY_TOKEN_ENV = "PILOTLIGHT_DEPLOY_TOKEN"
HOP_MAX_AGE_S = 60.0
FOR_ROUTERS = ""  # recipient of a hop to a router, instead of a site's name

# RFC 9110 section 7.6.1, and proxy-* of RFC 9110 section 11.7
HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade",
})  # fmt: skip

NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length"}  # and headers whose name begins with OURS


def milliseconds(value: str | None) -> int | None:
    """Return the whole milliseconds of a header's value, or None if it is missing or invalid."""
    return int(value) if value and value.isascii() and value.isdigit() and len(value) < 10 else None


def forwardable(headers: Iterable[tuple[str, str]], dropped: frozenset[str] = NOT_FORWARDED) -> list[tuple[str, str]]:
    """Return the headers to forward; names are lower case.

    Headers that `connection` names, Pilotlight's own headers and those of `dropped`, which includes NOT_FORWARDED, are left out.
    """
    kept = []
    named = ""
    for name, value in headers:
        name = name.lower()
        if name in dropped:
            if name == "connection":
                named += value + ","
        elif not name.startswith(OURS):
            kept.append((name, value))
    if named:
        others = {token.strip().lower() for token in named.split(",")}
        kept = [pair for pair in kept if pair[0] not in others]
    return kept


class Hop(msgspec.Struct, frozen=True):
    """The parts of a request that a signature covers.
    Messages after a handshake, such as a WebSocket's, are not covered: TLS between router and site protects them."""

    method: str
    path: str  # decoded, because a proxy in between may encode the same path differently
    request_id: str
    site: str  # the recipient; empty for the router
    query: str = ""


def signing(secret: str) -> str:
    """Return the secret that signs.

    While a network changes its secret it has two: the first one signs, and both are accepted.
    """
    return secret.partition(",")[0]


def lasting(secret: str) -> str:
    """Return the secret for tenants' salts, which is the last one.

    It changes only when the old secret is removed.
    """
    return secret.rpartition(",")[2]


NO_BODY = hashlib.sha256().hexdigest()


def sign_hop(secret: str, now_s: float, hop: Hop, body: bytes = b"") -> str:
    """Return a signature: STAMP.DIGEST.MAC.SITE.
    It includes the body's digest, so that everything else can be checked before the body arrives."""
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
    """Tell whether a hop is genuine, except for its body, which is not checked."""
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
    """Return STAMP.MAC, a site's signed time, with which the router then signs for this site.
    The request's id binds it to this response."""
    stamp = str(int(now_s))
    return f"{stamp}.{_mac(signing(secret), stamp, CLOCK, Hop('', '', request_id, site))}"


def told_clock(value: str, secret: str, site: str, request_id: str) -> float | None:
    """Return the site's time in seconds since the epoch; None if it was not signed with the secret."""
    stamp, _, mac = value.partition(".")
    if not (_is_stamp(stamp) and mac.isascii()):
        return None
    asked = Hop("", "", request_id, site)
    is_genuine = any(hmac.compare_digest(mac, _mac(each, stamp, CLOCK, asked)) for each in secret.split(","))
    return float(stamp) if is_genuine else None


def _is_stamp(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def _mac(secret: str, stamp: str, digest: str, hop: Hop) -> str:
    # The path comes last, because only it may contain line ends after decoding.
    mac = _keyed(secret).copy()
    mac.update(f"{stamp}\n{digest}\n{hop.site}\n{hop.method}\n{hop.request_id}\n{hop.query}\n{hop.path}".encode())
    return mac.hexdigest()


@lru_cache(16)  # a new HMAC takes 4 us longer than a copy
def _keyed(secret: str) -> hmac.HMAC:
    return hmac.new(secret.encode(), digestmod="sha256")
