"""The table of errors: Pilotlight's code (`word`), its HTTP status, and each dialect's code and body.

Every error that a client sees is a word of this table, with a sentence that names the change to make. Workers AI codes are Cloudflare's documented
ones where one fits; 5000 is ours, because they document none for an internal error.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import orjson

from pilotlight.wire.sse import encode_event


class Dialect(Enum):
    """The API that a request uses, which determines the form of its errors."""

    OPENAI = "openai"
    WORKERS_AI = "workers_ai"
    ANTHROPIC = "anthropic"
    OPENAI_RESPONSES = "openai_responses"
    OLLAMA = "ollama"


class ErrorKind(NamedTuple):
    status: int
    openai_type: str
    workers_ai_code: int
    workers_ai_status: int


_REQUEST, _SERVER, _LIMIT = "invalid_request_error", "server_error", "rate_limit_error"

ERRORS: dict[str, ErrorKind] = {
    "malformed_json": ErrorKind(400, _REQUEST, 5004, 400),
    "invalid_request": ErrorKind(400, _REQUEST, 5004, 400),
    "unknown_parameter": ErrorKind(400, _REQUEST, 5004, 400),
    "unsupported_parameter": ErrorKind(400, _REQUEST, 5004, 400),
    "context_length_exceeded": ErrorKind(400, _REQUEST, 3006, 413),
    "unauthorized": ErrorKind(401, "authentication_error", 10000, 401),
    "forbidden": ErrorKind(403, "permission_error", 5018, 403),
    "model_not_found": ErrorKind(404, _REQUEST, 5007, 400),
    "not_found": ErrorKind(404, _REQUEST, 3042, 404),
    "method_not_allowed": ErrorKind(405, _REQUEST, 5005, 405),
    "request_timeout": ErrorKind(408, "timeout_error", 3007, 408),
    "aborted": ErrorKind(499, "aborted", 3008, 408),
    "misdirected_request": ErrorKind(421, _REQUEST, 5004, 421),
    "conflict": ErrorKind(409, _REQUEST, 5004, 409),
    "body_too_large": ErrorKind(413, _REQUEST, 3006, 413),
    "headers_too_large": ErrorKind(431, _REQUEST, 3006, 413),
    "unhealthy_version": ErrorKind(422, _REQUEST, 5004, 422),
    "request_failed": ErrorKind(422, _REQUEST, 5004, 422),
    "function_not_found": ErrorKind(404, _REQUEST, 3042, 404),
    "function_failed": ErrorKind(500, _SERVER, 5000, 500),
    "function_limit": ErrorKind(500, _SERVER, 5000, 500),
    "quota_exceeded": ErrorKind(429, _LIMIT, 3036, 429),
    "internal_error": ErrorKind(500, _SERVER, 5000, 500),
    "engine_error": ErrorKind(500, _SERVER, 5000, 500),
    "model_load_failed": ErrorKind(500, _SERVER, 5000, 500),
    "not_implemented": ErrorKind(501, _REQUEST, 5004, 501),
    "http_version_not_supported": ErrorKind(505, _REQUEST, 5004, 505),
    "upstream_lost": ErrorKind(502, _SERVER, 5000, 502),
    "overloaded": ErrorKind(503, _SERVER, 3040, 429),
    "draining": ErrorKind(503, _SERVER, 3040, 429),
    "no_site_available": ErrorKind(503, _SERVER, 3040, 503),
    "upstream_timeout": ErrorKind(504, _SERVER, 3007, 408),
}

# Anthropic's type for each status; other statuses have the type of 400 or of 500.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip
OVERLOADED_STATUS = 529  # Anthropic's status for errors that are 503 in other dialects
ANTHROPIC_VERSION = b"anthropic-version"  # header that all of Anthropic's clients send
_OPENAI_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/rerank", "/v1/score", "/v1/classify")
OLLAMA_PATHS = "/api/"


class RateQuota(NamedTuple):
    """A limit per minute that is used up."""

    kind: str  # `requests` or `tokens`
    per_min: float


class ApiError(Exception):
    """An error with a code of the table.
    `param` names the request's field at fault; `retry_after_s` and `rate_limit` become headers."""

    def __init__(
        self,
        word: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        rate_limit: RateQuota | None = None,
    ) -> None:
        super().__init__(message)
        self.word = word
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.rate_limit = rate_limit
        self.kind = ERRORS[word]

    def status(self, dialect: Dialect) -> int:
        if dialect is Dialect.ANTHROPIC:
            return OVERLOADED_STATUS if self.kind.status == 503 else self.kind.status
        return self.kind.workers_ai_status if dialect is Dialect.WORKERS_AI else self.kind.status

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """Return the JSON body of the response, or of the error event in a stream."""
        if dialect is Dialect.ANTHROPIC:
            status = self.status(dialect)
            kind = _ANTHROPIC_TYPES.get(status) or _ANTHROPIC_TYPES[400 if status < 500 else 500]
            # Anthropic's form has no `code`; it is added because routers and people distinguish errors by it.
            return {"type": "error", "error": {"type": kind, "message": self.message, "code": self.word}}
        if dialect is Dialect.OLLAMA:
            # Ollama's form has no `code`; routers need it to distinguish errors of a site from errors of a request.
            return {"error": self.message, "code": self.word}
        if dialect is Dialect.WORKERS_AI:
            error = {"code": self.kind.workers_ai_code, "message": self.message}
            return {"result": None, "success": False, "errors": [error], "messages": []}
        error = {"message": self.message, "type": self.kind.openai_type, "param": self.param, "code": self.word}
        return {"error": error}

    def event(self, dialect: Dialect) -> bytes:
        """Return the server-sent event with the error, which ends a stream."""
        body = self.body(dialect)
        if dialect is Dialect.OPENAI_RESPONSES:
            body = {"type": "error", "code": self.word, "message": self.message, "param": self.param}
        named = dialect in (Dialect.ANTHROPIC, Dialect.OPENAI_RESPONSES)
        return encode_event(orjson.dumps(body), name="error" if named else None)

    def headers(self) -> list[tuple[str, str]]:
        headers = [("www-authenticate", "Bearer")] if self.word == "unauthorized" else []
        if self.retry_after_s is not None:
            headers.append(("retry-after", str(max(1, round(self.retry_after_s)))))
        if (limit := self.rate_limit) is not None:  # headers with OpenAI's names
            headers += [
                (f"x-ratelimit-limit-{limit.kind}", f"{limit.per_min:.0f}"),
                (f"x-ratelimit-remaining-{limit.kind}", "0"),
                (f"x-ratelimit-reset-{limit.kind}", f"{max(1, round(self.retry_after_s or 0))}s"),
            ]
        return headers


def dialect_of(path: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> Dialect:
    """Return the dialect of a request.

    OpenAI's paths are also available below Cloudflare's. A path that belongs to several dialects, or to none, is Anthropic's if the client sends
    Anthropic's version header.
    """
    if path.endswith("/v1/messages") or "/v1/messages/" in path:
        return Dialect.ANTHROPIC
    if "/v1/responses" in path:
        return Dialect.OPENAI_RESPONSES
    if path.startswith(OLLAMA_PATHS):
        return Dialect.OLLAMA
    if path.startswith("/client/v4/") and "/ai/v1/" not in path:
        return Dialect.WORKERS_AI
    is_of_openai = path.endswith(_OPENAI_PATHS) or path.startswith("/fn/")
    if not is_of_openai and any(name == ANTHROPIC_VERSION for name, _ in headers):
        return Dialect.ANTHROPIC
    return Dialect.OPENAI


def message_of(body: bytes) -> str:
    """Return the message of an error's body in any dialect; of any other body return the beginning."""
    try:
        fields = orjson.loads(body)
        error = fields["error"] if "error" in fields else fields["errors"][0]
        return error if isinstance(error, str) else str(error["message"])
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return body[:200].decode(errors="replace")
