"""Traces of requests for a collector that speaks OTLP over HTTP: a span for each request, and below it one for each site that was asked.

A client's `traceparent` (W3C Trace Context) is gone on with, and sites and functions get one whose parent is the try that asked them. Names are those
of OpenTelemetry's conventions for HTTP servers and, for models, of its GenAI conventions. No span has anything of a prompt or an answer. Spans are
sent from a thread of the SDK's, in batches; what a collector does not take is dropped.
"""

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from edge_router.proxied import ProxiedRequest
from edge_router.request import ValidRequest
from sites.config import ConfigError
from wire.errors import ApiError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span

SEND_TIMEOUT_S = 2.0  # for a batch, and so for the last one when the router stops
_OPERATIONS = (
    ("/chat/completions", "chat"),
    ("/messages", "chat"),
    ("/responses", "chat"),
    ("/embeddings", "embeddings"),
)
_SENT_BEFORE = re.compile(rb"^(?:traceparent|tracestate): [^\r\n]*\r\n", re.MULTILINE)


class Tracing:
    """One for a router; the SDK is imported here and nowhere else, so that a router without a collector does not load it."""

    def __init__(self, collector: str, place: str, version: str) -> None:
        """`collector`: its URL, to which OTLP's path is added where it has none. Raises ConfigError."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"telemetry.otlp needs the extra packages of pilotlight[telemetry]: {error}") from None
        url = collector if collector.count("/") > 2 else f"{collector}/v1/traces"
        named = {"service.name": "pilotlight-router", "service.version": version, "pilotlight.place": place}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=SEND_TIMEOUT_S)))
        self._tracer = self._provider.get_tracer("pilotlight.edge_router", version)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace

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
        caller = self._propagator.extract({key: head.header(key) for key in ("traceparent", "tracestate")})
        span = self._tracer.start_span(name, caller, self._trace.SpanKind.SERVER, attributes)
        return RequestTrace(self, span, self._trace.set_span_in_context(span, caller))

    def try_span(self, site: str, context: "Context") -> "tuple[Span, bytes]":
        """Return a span, and the lines of a head that name it as the parent."""
        span = self._tracer.start_span(f"try {site}", context, self._trace.SpanKind.CLIENT, {"pilotlight.site": site})
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span, context))
        return span, "".join(f"{name}: {value}\r\n" for name, value in carrier.items()).encode()

    def close(self) -> None:
        """Send what is left. Waits for the collector, so it is not for an event loop."""
        self._provider.shutdown()

    def fail(self, span: "Span", why: str) -> None:
        span.set_attribute("error.type", why)
        span.set_status(self._trace.StatusCode.ERROR)


class RequestTrace:
    """One request's span, and that of the site that is being asked."""

    def __init__(self, tracing: Tracing, span: "Span", context: "Context") -> None:
        self._tracing = tracing
        self._span = span
        self._context = context
        self._try: Span | None = None

    def begin_try(self, site: str, request: ValidRequest) -> ValidRequest:
        """Return the request as that site is to get it."""
        self._try, lines = self._tracing.try_span(site, self._context)
        return replace(request, forwarded_lines=_SENT_BEFORE.sub(b"", request.forwarded_lines) + lines)

    def end_try(self, failure: str = "") -> None:
        if self._try is not None:
            if failure:
                self._tracing.fail(self._try, failure)
            self._try.end()
            self._try = None

    def end(self, proxied: ProxiedRequest, error: BaseException | None) -> None:
        """`error`: with which the request ended."""
        self.end_try("" if proxied.is_complete else "cut")
        span = self._span
        if proxied.request.model is not None:
            used = proxied.log.used if proxied.log.has_begun else proxied.whole
            span.set_attribute("gen_ai.usage.input_tokens", used.prompt)
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", used.cached)
            span.set_attribute("gen_ai.usage.output_tokens", used.output)
        if proxied.first_token_s is not None:
            span.set_attribute("pilotlight.first_token_s", proxied.first_token_s)
        if proxied.status:
            span.set_attribute("http.response.status_code", proxied.status)
        if error is not None or proxied.status >= 500:
            self._tracing.fail(
                span,
                error.word if isinstance(error, ApiError) else type(error).__name__ if error else str(proxied.status),
            )
        span.end()
