"""The router's door: a request's head and body go in, a ValidRequest comes out, and nothing behind it looks at the raw form again.

It reads only what choosing a site needs: model, stream flag, session, messages. Whether the rest makes sense is the site's to judge, so the body
travels on untouched.
"""

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
from msgspec.structs import force_setattr

from edge_router.client_places import FindPlace
from edge_router.policy import RouteRequest
from edge_router.session import Conversation, Recall, prefix_chain, session_digest, tenant_salt
from wire.continuation import ANSWER, AnswerName, encode_answer
from wire.errors import ApiError, Dialect, dialect_of
from wire.headers import (
    CLIENT_ADDRESS,
    CLIENT_GEO,
    HOP,
    HOP_SECRET_ENV,
    HOPS,
    PATIENCE,
    PREFIXES,
    REQUEST_ID,
    SESSION_AFFINITY,
    forwardable,
    hop_is_genuine,
    sign_hop,
)
from wire.prefixes import encode_named
from wire.status import Place

FUNCTIONS = "/fn/"  # paths whose requests and answers are somebody's own: relayed as bytes, never read
MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")  # of a message, what reaches the prompt
TEXT_PIECE_BYTES = 1024  # a plain prompt is fingerprinted in pieces of this size
NOT_JSON = (
    "multipart/",
    "audio/",
    "image/",
    "video/",
)  # everything else is read as JSON: curl calls it a form, others octets

_RUN_PATH = re.compile(r"^/client/v4/accounts/([^/]+)/ai/run/(.+)$")
_ACCOUNT_PATH = re.compile(r"^/client/v4/accounts/([^/]+)/")
_NICE_ID = re.compile(r"^[A-Za-z0-9._:/+=@-]{1,128}$")


class Head(msgspec.Struct, frozen=True):
    """A request as it arrived, without its body."""

    method: str
    path: str  # decoded
    target: str  # as sent, query included
    headers: list[tuple[str, str]]  # names lower case
    first: dict[str, str] = {}  # of each name; made here, for a request is asked for a dozen of them

    def __post_init__(self) -> None:
        force_setattr(self, "first", dict(reversed(self.headers)))

    def header(self, name: str) -> str:
        return self.first.get(name, "")

    @property
    def is_for_function(self) -> bool:
        return self.path.startswith(FUNCTIONS)

    @property
    def may_be_repeated(self) -> bool:
        """After it may have been begun. An answer of a model may always be made again; what a function did is not known."""
        return not self.is_for_function or self.method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE")

    @property
    def dialect(self) -> Dialect:
        return dialect_of(self.path)


class ValidRequest(msgspec.Struct, frozen=True):
    head: Head
    body: bytes
    model: str | None
    wants_stream: bool
    conversation: Conversation
    client: Place | None
    request_id: str
    upstream_headers: list[tuple[str, str]]  # without signature: that is made when they are sent
    answer_name: AnswerName | None = None  # whichever site makes it; None: it is nothing that could be made twice
    delivery: bytes = b""  # of a stream that is to be continued, what its client has
    delivered_tokens: int = 0
    patience_ms: float | None = (
        None  # the queue with which the next site had better decline; None: it is to take the request
    )

    @property
    def is_generated_whole(self) -> bool:
        """The site is silent until the last token."""
        return self.model is not None and not self.wants_stream

    def route(self, recall: Recall, now_s: float) -> RouteRequest:
        conversation = self.conversation
        tokens = conversation.tokens + self.delivered_tokens  # both have to be computed where neither is cached
        return RouteRequest(
            self.model,
            tokens,
            conversation.placement_key,
            recall.home,
            self.client,
            recall.held,
            conversation.short_digests(),
            now_s,
        )

    def sent_headers(self, secret: str, now_s: float) -> list[tuple[str, str]]:
        """A signature lives for a minute, a request through several sites longer: so each try has its own."""
        if not secret:
            return self.upstream_headers
        signature = sign_hop(secret, now_s, self.head.method, self.head.path, self.request_id)
        headers = [*self.upstream_headers, (HOP, signature)]
        if self.answer_name is not None:
            headers.append((ANSWER, encode_answer(self.answer_name, self.delivery)))
        if self.patience_ms is not None:
            headers.append((PATIENCE, str(round(self.patience_ms))))
        if self.conversation.prefixes:
            headers.append((PREFIXES, encode_named(self.conversation.short_digests())))
        return headers


def request_id_of(head: Head) -> str:
    """The client's own if it is short and printable, else a new one."""
    given = head.header(REQUEST_ID)
    return given if _NICE_ID.match(given) else os.urandom(16).hex()


def peek(
    head: Head, body: bytes, request_id: str, secret: str, max_hops: int, find_place: FindPlace, address: str
) -> ValidRequest:
    """Raises ApiError on what no site could answer. `address`: where the request came from."""
    is_hop = bool(secret) and hop_is_genuine(
        head.header(HOP), secret, time.time(), head.method, head.path, head.header(REQUEST_ID)
    )
    hops = (_hops_so_far(head) if is_hop or not secret else 0) + 1
    if hops > max_hops:
        message = f"the request has passed {max_hops} routers: a site's url in a network file leads back to a router"
        raise ApiError("invalid_request", message)
    fields = _parse(head, body)
    account, model = _account_and_model(head, fields)
    salt = tenant_salt(head.header("authorization"), account, secret)
    place = find_place(address, head.header(CLIENT_GEO), is_hop)
    return ValidRequest(
        head=head,
        body=body,
        model=model,
        wants_stream=fields.get("stream") is True,
        conversation=_conversation(head, fields, salt, model or ""),
        client=place,
        request_id=request_id,
        upstream_headers=_upstream_headers(head, request_id, hops, "" if is_hop else address, place),
        answer_name=AnswerName.fresh() if secret and model is not None else None,
    )


def hop_secret() -> str:
    """The network's shared secret; empty where none is set."""
    return os.environ.get(HOP_SECRET_ENV, "")


def _hops_so_far(head: Head) -> int:
    """Where the network has a secret, only its own routers are believed. Where it has none, everybody is: a client that invents a count harms
    nobody but itself, and a loop still ends."""
    count = head.header(HOPS)
    return int(count) if count.isascii() and count.isdigit() and len(count) < 4 else 0


def _upstream_headers(
    head: Head, request_id: str, hops: int, address: str, place: Place | None
) -> list[tuple[str, str]]:
    """`address`: the client's, where it is ours to say. A function reads it and versions are shared out by it, so a client's own word is dropped,
    and so is its word of where it stands, which another router would take for ours."""
    # an `Expect` was answered by our own server already
    ours = {REQUEST_ID, "accept-encoding", "expect", CLIENT_GEO}
    if address and head.is_for_function:
        ours.add(CLIENT_ADDRESS)
    kept = [(name, value) for name, value in forwardable(head.headers) if name not in ours]
    if CLIENT_ADDRESS in ours:
        kept.append((CLIENT_ADDRESS, address))
    if place is not None:
        kept.append((CLIENT_GEO, f"{place.latitude:g},{place.longitude:g}"))
    return [*kept, (REQUEST_ID, request_id), ("accept-encoding", "identity"), (HOPS, str(hops))]


def _parse(head: Head, body: bytes) -> dict[str, Any]:
    if not body or head.is_for_function or head.header("content-type").lower().startswith(NOT_JSON):
        return {}
    if head.header("content-encoding").lower() not in ("", "identity"):
        raise ApiError("invalid_request", "a request body must not be compressed: drop the content-encoding header")
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError("malformed_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError("invalid_request", 'the body must be a JSON object, such as {"model": ...}')
    return fields


def _account_and_model(head: Head, fields: dict[str, Any]) -> tuple[str, str | None]:
    is_workers_ai = head.path.startswith("/client/")
    if is_workers_ai and (run := _RUN_PATH.match(head.path)):
        return run[1], run[2]
    account = _ACCOUNT_PATH.match(head.path) if is_workers_ai else None
    model = fields.get("model")
    return account[1] if account else "", model if isinstance(model, str) else None


def _conversation(head: Head, fields: dict[str, Any], salt: bytes, model: str) -> Conversation:
    name = head.header(SESSION_AFFINITY) or fields.get("prompt_cache_key")
    session = session_digest(salt, model, name) if isinstance(name, str) and name else None
    tools = fields.get("tools")
    seed = model.encode() + b"\0" + (_canonical(tools) if tools else b"")
    pieces = list(_pieces(fields))
    tokens = (len(seed) + sum(len(piece) for piece, _ in pieces)) // 4 if pieces else 0
    return Conversation(session, prefix_chain(salt, seed, pieces), tokens)


def _pieces(fields: dict[str, Any]) -> Iterator[tuple[bytes, bool]]:
    """The prompt in pieces that a later turn repeats, and whether a prefix ending there tells conversations apart."""
    messages, prompt = fields.get("messages"), fields.get("prompt")
    if isinstance(messages, list):
        user_has_spoken = False
        for message in messages:
            if isinstance(message, dict):
                user_has_spoken = user_has_spoken or message.get("role") not in ("system", "developer")
                yield _canonical([message.get(field) for field in MESSAGE_FIELDS]), user_has_spoken
            else:
                yield _canonical(message), user_has_spoken
    elif prompt is not None:
        raw = prompt.encode() if isinstance(prompt, str) else _canonical(prompt)
        for start in range(0, len(raw), TEXT_PIECE_BYTES):
            yield raw[start : start + TEXT_PIECE_BYTES], True


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
