"""Parsing of requests: head and body go in, a ValidRequest comes out.

Later code does not look at the raw form again.

This module reads only what the choice of a site needs: model, stream flag, session, messages. The site validates the rest, so the body is forwarded
unchanged.
"""

import asyncio
import hashlib
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import getrandbits
from typing import Annotated, Any, NamedTuple, TypeVar, TypeVarTuple

import msgspec
import orjson

from pilotlight.dialects.anthropic import VERSION_HEADER
from pilotlight.dialects.prefix_pieces import canonical
from pilotlight.dialects.table import prompt_pieces, routing_fields
from pilotlight.edge_router.requests.client_places import FindPlace
from pilotlight.edge_router.requests.session import (
    ConversationFingerprint,
    Recall,
    prefix_chain,
    session_digest,
    tenant_salt,
)
from pilotlight.edge_router.routing.views import RouteRequest
from pilotlight.wire.chat import MAX_ITEMS, MAX_MESSAGES
from pilotlight.wire.credentials import API_KEYS, Key, bearer_token, owner_of, salted
from pilotlight.wire.errors import ANTHROPIC_VERSION, ApiError, Dialect, dialect_of
from pilotlight.wire.hop.continuation import ANSWER, AnswerName, encode_answer
from pilotlight.wire.hop.headers import (
    ACCOUNT,
    CLIENT_ADDRESS,
    CLIENT_GEO,
    CLIENT_ORIGIN,
    HOP,
    HOP_SECRET_ENV,
    HOPS,
    MAX_QUEUE_WAIT,
    NO_BODY,
    NOT_FORWARDED,
    OWN_HOST,
    PREFIXES,
    REQUEST_ID,
    SESSION_AFFINITY,
    WAITED,
    Hop,
    forwardable,
    milliseconds,
    sign_hop,
    signed_body,
    site_of_hop,
)
from pilotlight.wire.hop.prefixes import encode_prompt_prefixes
from pilotlight.wire.hop.status import Place

FUNCTIONS = "/fn/"  # paths of functions: requests and responses are relayed as bytes and never parsed
MODELS_AS_FUNCTIONS = "/fn/@"  # exception: /fn/@org/model is a model
AT_ONCE_BYTES = 256 << 10  # bodies up to this size are parsed on the event loop, in a few milliseconds

_RUN_PATH = re.compile(r"^/client/v4/accounts/([^/]+)/ai/run/(.+)$")
_ACCOUNT_PATH = re.compile(r"^/client/v4/accounts/([^/]+)/")
_WISH = re.compile(r'(?i)(?:^|[,;])\s*site\s*=\s*"?([a-z0-9._-]+)"?\s*(?:[,;]|$)')  # in a Prefer header (RFC 7240)
_NICE_ID = re.compile(r"^[A-Za-z0-9._:/+=@-]{1,128}$")
# Headers that the router writes itself, so a client's are dropped. Our own server has already answered `Expect`.
_WRITTEN_ANEW = frozenset({REQUEST_ID, "accept-encoding", "expect", CLIENT_GEO})
_DROPPED_FOR_FUNCTIONS = NOT_FORWARDED | _WRITTEN_ANEW | {"authorization"}
# A model needs no credentials.
_DROPPED = _DROPPED_FOR_FUNCTIONS | {"cookie", *(name.decode() for name in API_KEYS)}


_ANTHROPIC = ((ANTHROPIC_VERSION, b""),)
_MOST_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

# Parses all large bodies in one thread: several threads would compete with the event loop for Python's global lock.
_thread = ThreadPoolExecutor(1, "large bodies")


async def aside_if_large(body: bytes, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
    """Run work on a body; for a large body, in a thread instead of the event loop."""
    if len(body) <= AT_ONCE_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_thread, lambda: work(*args))


class Head:
    """The head of a request as it arrived."""

    __slots__ = (
        "_first", "dialect", "headers", "holder", "is_at_own_host", "is_for_batch", "is_for_function", "is_websocket", "key", "method", "owner",
        "path", "scheme", "target", "usage_id",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        path: str,
        target: str,
        headers: list[tuple[str, str]],
        *,
        scheme: str = "http",
        is_websocket: bool = False,
        is_at_own_host: bool = False,
        holder: Key | None = None,
    ) -> None:
        """The head of a request.

        `path` is decoded; `target` is unchanged, with the query; header names are lower case; `scheme` is the connection's.
        """
        self.is_at_own_host = is_at_own_host  # the client used a host name of the function
        self.method = method
        self.path = path
        self.target = target
        self.headers = headers
        self.scheme = scheme
        self.is_websocket = is_websocket  # the request asks for a WebSocket
        self.is_for_function = path.startswith(FUNCTIONS) and not path.startswith(MODELS_AS_FUNCTIONS)
        self.is_for_batch = False  # no client waits for the answer
        self.usage_id = ""  # id of its usage record if another process sends it again when this one is killed
        self._first = dict(reversed(headers))
        self.dialect = dialect_of(path, _ANTHROPIC if VERSION_HEADER in self._first else ())
        self.key = bearer_token(self._first.get("authorization"))  # the client's key; empty if it has none
        self.hold(holder)

    def hold(self, holder: Key | None) -> None:
        """Set the configured key that admission found for the request; None if the client's key is unknown."""
        self.holder = holder
        # the id of the request's owner: its account if that is known, otherwise the client's key
        self.owner = self.key if holder is None else owner_of(None, holder.account.name)

    def header(self, name: str) -> str:
        """Return the first header with this name; "" if the request has no such header."""
        return self._first.get(name, "")

    def has(self, name: str) -> bool:
        return name in self._first

    @property
    def may_be_repeated(self) -> bool:
        """Tell whether the request may be repeated although a site may have started it.
        A model's answer can be made again; a function may be called again if HTTP defines the method as idempotent."""
        return not self.is_for_function or self.method in ("GET", "HEAD", "OPTIONS", "PUT", "DELETE")


class _Anything(msgspec.Struct, gc=False):
    """Any JSON object."""


_Items = Annotated[list[_Anything], msgspec.Meta(max_length=MAX_ITEMS)]


class _MessageShape(msgspec.Struct, gc=False):
    content: str | _Items | None = None
    tool_calls: _Items | None = None


class _Shape(msgspec.Struct, gc=False):
    messages: list[_MessageShape] | None = None
    tools: _Items | None = None


_shape_decoder = msgspec.json.Decoder(_Shape)


class ValidRequest(msgspec.Struct, frozen=True):
    head: Head
    body: bytes
    model: str | None
    wants_stream: bool
    conversation: ConversationFingerprint
    client: Place | None
    request_id: str
    forwarded_lines: bytes  # header lines without a signature, which is added when they are sent
    answer_name: AnswerName | None = None  # identifies the answer at every site; None if it cannot be continued
    delivery: bytes = b""  # the part of a continued stream that the client already has
    delivered_tokens: int = 0
    most_tokens: int = 0  # longest answer that the request allows; 0 without a limit
    adapter: str = ""  # the adapter, if the body names it separately from the model
    max_queue_ms: float | None = None  # a site with a longer queue should decline; None if it must accept the request
    waited_ms: int = 0  # time that it has waited at other sites, also those of the router before this one

    @property
    def asked_model(self) -> str | None:
        """The model with its requested adapter, as accounts' lists name them."""
        return f"{self.model}:{self.adapter}" if self.model is not None and self.adapter else self.model

    @property
    def wished_site(self) -> str:
        """The site that the client prefers (`prefer: site=NAME`); empty without a preference."""
        found = _WISH.search(self.head.header("prefer"))
        return "" if found is None else found[1]

    @property
    def is_generated_whole(self) -> bool:
        """Tell whether the site sends nothing before the last token is computed."""
        return self.model is not None and not self.wants_stream

    def expected_tokens(self, answer: int) -> int:
        """Return the tokens that the request may use, including the prompt.

        `answer` is the number assumed for an answer without a maximum.
        """
        # requests for embeddings have no prefixes
        has_answer = self.model is not None and bool(self.conversation.prefixes)
        return self.conversation.tokens + (self.most_tokens or (answer if has_answer else 0))

    def route(self, recall: Recall, now_s: float) -> RouteRequest:
        conversation = self.conversation
        tokens = conversation.tokens + self.delivered_tokens  # a site that has cached nothing computes both
        return RouteRequest(
            self.model,
            tokens,
            conversation.placement_key,
            recall.home,
            self.client,
            recall.held,
            conversation.short_digests,
            now_s,
        )

    def head_lines(self, secret: str, now_s: float, site: str, body: bytes) -> bytes:
        """Return the header lines for the next site.
        A signature is for one site and valid for a minute, so each try has its own."""
        lines = f"{REQUEST_ID}: {self.request_id}\r\n"
        if secret:
            if self.head.holder is not None:
                lines += f"{ACCOUNT}: {self.head.holder.account.name}\r\n"
            lines += f"{HOP}: {sign_hop(secret, now_s, _hop(self.head, self.request_id, site), body)}\r\n"
            if self.answer_name is not None:
                lines += f"{ANSWER}: {encode_answer(self.answer_name, self.delivery)}\r\n"
            if self.max_queue_ms is not None:
                lines += f"{MAX_QUEUE_WAIT}: {round(self.max_queue_ms)}\r\n"
            if self.waited_ms:
                lines += f"{WAITED}: {self.waited_ms}\r\n"
            if self.conversation.prefixes:
                lines += f"{PREFIXES}: {encode_prompt_prefixes(self.conversation.short_digests)}\r\n"
        return self.forwarded_lines + lines.encode("latin-1")


def _hop(head: Head, request_id: str, site: str) -> Hop:
    return Hop(head.method, head.path, request_id, site, head.target.partition("?")[2])


def request_id_of(head: Head) -> str:
    """Return the client's request id if it is short and printable, otherwise a new one."""
    given = head.header(REQUEST_ID)
    return given if given and _NICE_ID.match(given) else f"{getrandbits(128):032x}"  # an id need not be secret


class RequestParser(NamedTuple):
    """Parses requests, with the settings that are the same for all requests of a network."""

    secret: str
    max_hops: int
    find_place: FindPlace

    def parse(self, head: Head, body: bytes, request_id: str, address: str) -> ValidRequest:
        """Return the router's view of a request from `address`.
        May be called in a thread. Raises ApiError if no site could answer it."""
        secret = self.secret
        digest = _signed_digest(head, secret) if secret and head.has(HOP) else None
        is_hop = digest is not None
        if is_hop and digest != (hashlib.sha256(body).hexdigest() if body else NO_BODY):
            raise ApiError("forbidden", "the body differs from the signed one")
        hops = (_hops_so_far(head) if is_hop or not secret else 0) + 1
        if hops > self.max_hops:
            raise ApiError(
                "invalid_request",
                f"the request has passed {self.max_hops} routers: a site's url in a router's file leads back to a router",
            )
        authorization = head.header("authorization") if is_hop else _site_authorization(head, secret)
        lines = _forwarded_lines(head, hops, "" if is_hop else address, is_hop, authorization)
        place = self.find_place(address, head.header(CLIENT_GEO), is_hop)
        if place is not None:
            lines += _place_line(place)
        account, model = _account_and_model(head)
        # The declared type of a body is ignored, as sites ignore it: curl calls JSON a form, others call it octets.
        fields = _parse(head, body) if body and not head.is_for_function else {}
        fields = routing_fields(head.dialect, head.path, fields)
        if model is None:
            named = fields.get("model")
            model = named if isinstance(named, str) else None
        salt = salted(tenant_salt(head.owner, account, secret), fields.get("cache_salt"))
        conversation = _conversation(salt, head, fields, model or "")
        name = AnswerName.fresh() if secret and model is not None else None
        wants_stream = fields.get("stream") is True
        most = _most_tokens(fields)
        lora = fields.get("lora")
        adapter = lora if isinstance(lora, str) else ""
        return ValidRequest(
            head,
            body,
            model,
            wants_stream,
            conversation,
            place,
            request_id,
            lines,
            name,
            most_tokens=most,
            adapter=adapter,
            waited_ms=(milliseconds(head.header(WAITED)) or 0) if is_hop else 0,
        )


def _most_tokens(fields: dict[str, Any]) -> int:
    """Return the maximum output tokens of all choices of all prompts, in any dialect.
    Values that are not numbers are left for the site to refuse."""
    most = max([_count(fields[name]) for name in _MOST_TOKENS if name in fields], default=0)
    prompts = fields.get("prompt")
    if not (isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list)):
        prompts = (prompts,)  # one prompt: a string, or a list of token ids
    return most * (_count(fields.get("n")) or 1) * len(prompts)


def _count(value: Any) -> int:
    return int(value) if type(value) in (int, float) and 0 < value < 2**53 else 0


def speaks_for_an_account(head: Head, secret: str) -> bool:
    """Tell whether to trust the account that a request names.

    It is trusted if another router forwards the request (routers add the header HOPS), or if a site sends a function's request for a model that it
    lacks. The hop must be signed.
    """
    may_speak = bool(head.header(ACCOUNT)) if head.has(HOPS) else not head.has("authorization")
    return may_speak and _signed_digest(head, secret) is not None


def site_key(head: Head, secret: str) -> str:
    """Return the value that replaces a client's key at sites, where it only identifies a tenant.

    Without the network's secret sites get the key itself, because nothing else identifies the tenant.
    """
    return tenant_salt(head.key, "", secret).hex() if secret and head.key else head.key


def _site_authorization(head: Head, secret: str) -> str:
    """Return the Authorization header for a site; empty if sites get none.
    A function's author may read the headers of its clients, but not a key of the network."""
    if head.is_for_function:
        return "" if head.holder is not None else head.header("authorization")
    key = site_key(head, secret)
    return f"Bearer {key}" if key else ""


def _signed_digest(head: Head, secret: str) -> str | None:
    """Return the digest of the body if a router or site of the network has signed the request, else None.
    The signature may name any recipient, because a router has no name to compare with."""
    signature = head.header(HOP)
    hop = _hop(head, head.header(REQUEST_ID), site_of_hop(signature))
    return signed_body(signature, secret, time.time(), hop)


def hop_secret() -> str:
    """The network's shared secret; empty if none is set."""
    return os.environ.get(HOP_SECRET_ENV, "")


def _hops_so_far(head: Head) -> int:
    """Return the number of hops so far.
    With a network secret only its own routers are believed; without one, every client is: an invented count harms only its sender, and a loop still
    ends."""
    count = head.header(HOPS)
    return int(count) if count.isascii() and count.isdigit() and len(count) < 4 else 0


def _forwarded_lines(head: Head, hops: int, address: str, is_hop: bool, authorization: str) -> bytes:
    """Return the header lines for a site: the client's that may be forwarded, and this router's own.
    `address` is the client's address; empty if another router sent the request. For a function it replaces the client's own header of that name,
    because functions read it and it decides the version. The client's location header is dropped, because another router would trust it.
    `authorization` is the value for sites."""
    dropped = _DROPPED_FOR_FUNCTIONS if head.is_for_function else _DROPPED
    lines = [f"{name}: {value}\r\n" for name, value in forwardable(head.headers, dropped)]
    if authorization:
        lines.append(f"authorization: {authorization}\r\n")
    if head.is_for_function:
        if address:
            lines = [line for line in lines if not line.startswith(CLIENT_ADDRESS + ":")]
            lines.append(f"{CLIENT_ADDRESS}: {address}\r\n")
        origin = head.header(CLIENT_ORIGIN) if is_hop else f"{head.scheme}://{head.header('host')}"
        lines.append(f"{CLIENT_ORIGIN}: {origin}\r\n")
        if head.is_at_own_host or (is_hop and head.has(OWN_HOST)):
            lines.append(f"{OWN_HOST}: 1\r\n")
    lines.append(f"accept-encoding: identity\r\n{HOPS}: {hops}\r\n")
    return "".join(lines).encode("latin-1")


def _place_line(place: Place) -> bytes:
    return f"{CLIENT_GEO}: {place.latitude:g},{place.longitude:g}\r\n".encode()


def _parse(head: Head, body: bytes) -> dict[str, Any]:
    if head.header("content-encoding").lower() not in ("", "identity"):
        raise ApiError("invalid_request", "a request body must not be compressed: drop the content-encoding header")
    if len(body) > AT_ONCE_BYTES:
        _check_shape(body)
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError("malformed_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError("invalid_request", 'the body must be a JSON object, such as {"model": ...}')
    messages = fields.get("messages")
    if isinstance(messages, list):
        _check_number(len(messages))
        if not all([isinstance(message, dict) for message in messages]):
            raise ApiError("invalid_request", "each message must be an object", param="messages")
    return fields


def _check_shape(body: bytes) -> None:
    """Refuse a large body with too many parts before objects are made of it.

    80,000 tool calls hold Python's lock for 125 ms, this check takes 5 ms. Raises ApiError; a body that is not JSON is refused by `_parse`.
    """
    try:
        shape = _shape_decoder.decode(body)
    except msgspec.ValidationError as error:
        sentence = f"messages, their parts, tool calls and tools must be lists of objects, {MAX_ITEMS} at most but for messages: {error}"
        raise ApiError("invalid_request", sentence, param="messages") from None
    except msgspec.DecodeError:
        return
    _check_number(len(shape.messages or ()))


def _check_number(num_messages: int) -> None:
    if num_messages > MAX_MESSAGES:
        sentence = f"{num_messages} messages are more than the limit of {MAX_MESSAGES}"
        raise ApiError("invalid_request", sentence, param="messages")


def _account_and_model(head: Head) -> tuple[str, str | None]:
    """Return the account and the model, if the path names them."""
    if head.path.startswith(MODELS_AS_FUNCTIONS):
        return "", head.path.removeprefix(FUNCTIONS)
    if not head.path.startswith("/client/"):
        return "", None
    if run := _RUN_PATH.match(head.path):
        return run[1], run[2]
    account = _ACCOUNT_PATH.match(head.path)
    return account[1] if account else "", None


def _conversation(salt: bytes, head: Head, fields: dict[str, Any], model: str) -> ConversationFingerprint:
    name = head.header(SESSION_AFFINITY) or fields.get("prompt_cache_key")
    session = session_digest(salt, model, name) if isinstance(name, str) and name else None
    tools = fields.get("tools")
    seed = model.encode() + b"\0" + (canonical(tools) if tools else b"")
    dialect = Dialect.WORKERS_AI if head.path.startswith(MODELS_AS_FUNCTIONS) else head.dialect
    prefixes = prefix_chain(salt, seed, prompt_pieces(dialect, fields))
    if prefixes:
        return ConversationFingerprint.of(session, prefixes, prefixes[-1].tokens)
    texts = fields.get("input") or fields.get("text")  # prompts of embeddings: no later request continues them
    return ConversationFingerprint.of(session, (), len(canonical(texts)) // 4 if texts else 0)
