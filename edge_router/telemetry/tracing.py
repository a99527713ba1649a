"""The router's spans: one for each request, with a child for each site that was tried.

A client's `traceparent` is continued, and sites and functions get one whose parent is the attempt's span. Names are those of OpenTelemetry's
conventions for HTTP servers and, for models, of its GenAI conventions. Spans contain nothing of prompts or answers. wire/tracing.py sends them.
"""

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pilotlight.edge_router.requests.request import ValidRequest
from pilotlight.sites.config import ConfigError
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.tracing import PARENT_HEADERS, Spans

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_OPERATIONS = (
    ("/chat/completions", "chat"),
    ("/messages", "chat"),
    ("/responses", "chat"),
    ("/embeddings", "embeddings"),
    ("/rerank", "rerank"),
    ("/score", "score"),
    ("/classify", "classify"),
)
_SENT_BEFORE = re.compile(rb"^(?:traceparent|tracestate): [^\r\n]*\r\n", re.MULTILINE)


class Tracing:
    """Creates the spans of one router."""

    def __init__(self, collector: str, place: str, version: str) -> None:
        """Raises ConfigError if the packages for the export are not installed."""
        try:
            self.spans = Spans(collector, "pilotlight-router", version, place=place)
        except ImportError as error:
            raise ConfigError(
                f"telemetry.otlp needs the extra packages of pilotlight-inference[telemetry]: {error}"
            ) from None

    def begin(self, request: ValidRequest) -> "RequestTrace":
        head = request.head
        attributes = {
            "http.request.method": head.method,
            "url.path": head.path,
            "pilotlight.request_id": request.request_id,
        }
        name = f"{head.method} {head.path.split('/', 3)[1]}"
        if request.model is not None:
            operation = next((word for end, word in _OPERATIONS if head.path.endswith(end)), "text_completion")
            name = f"{operation} {request.model[:200]}"
            attributes |= {
                "gen_ai.operation.name": operation, "gen_ai.provider.name": "pilotlight", "gen_ai.request.model": request.model[:200],
            }  # fmt: skip
        caller = {key: head.header(key) for key in PARENT_HEADERS}
        return RequestTrace(self.spans, self.spans.start(name, caller, "server", attributes))

    def close(self) -> None:
        """Send the remaining spans. This waits for the collector, so do not call it in an event loop."""
        self.spans.close()


class RequestTrace:
    """The spans of one request and of its current attempt."""

    def __init__(self, spans: Spans, span: "Span") -> None:
        self._spans = spans
        self._span = span
        self._try: Span | None = None

    def begin_try(self, site: str, request: ValidRequest) -> ValidRequest:
        """Start the span of an attempt; return the request with that span as its parent."""
        parent = self._spans.as_parent(self._span)
        self._try = self._spans.start(f"try {site}", parent, "client", {"pilotlight.site": site})
        lines = "".join(f"{name}: {value}\r\n" for name, value in self._spans.as_parent(self._try).items()).encode()
        return replace(request, forwarded_lines=_SENT_BEFORE.sub(b"", request.forwarded_lines) + lines)

    def end_try(self, failure: str = "") -> None:
        if self._try is not None:
            if failure:
                self._spans.fail(self._try, failure)
            self._try.end()
            self._try = None

    def end(
        self,
        *,
        status: int,
        is_complete: bool,
        first_token_s: float | None,
        used: ResourceUse | None,
        error: BaseException | None,
    ) -> None:
        """End the spans. `used` is the usage of a model; `error` ended the request, if any."""
        self.end_try("" if is_complete else "cut")
        span = self._span
        if used is not None:
            span.set_attribute("gen_ai.usage.input_tokens", used.prompt)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", used.cached)
            span.set_attribute("gen_ai.usage.output_tokens", used.output)
        if first_token_s is not None:
            span.set_attribute("pilotlight.first_token_s", first_token_s)
        if status:
            span.set_attribute("http.response.status_code", status)
        if error is not None or status >= 500:
            self._spans.fail(
                span, error.word if isinstance(error, ApiError) else type(error).__name__ if error else str(status)
            )
        span.end()
