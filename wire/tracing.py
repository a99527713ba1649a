"""Spans that a process creates and sends to a collector, with OTLP over HTTP.

The parent span of the current work is stored here, too.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

SEND_TIMEOUT_S = 2.0  # time limit to send a batch of spans, and so the last spans when the process stops
PARENT_HEADERS = ("traceparent", "tracestate")

Parent = Mapping[str, str]  # headers by the names of PARENT_HEADERS
Kind = Literal["server", "client", "internal"]
Attributes = Mapping[str, str | int | float]

CURRENT: ContextVar[Parent] = ContextVar("parent of spans", default=MappingProxyType({}))


def otlp_url(collector: str, signal: Literal["traces", "logs"]) -> str:
    """Return the URL that takes a kind of records; OTLP's path is added to a URL without a path."""
    collector = collector.rstrip("/")
    return collector if collector.count("/") > 2 else f"{collector}/v1/{signal}"


class Spans:
    """Creates and sends the spans of one process."""

    def __init__(self, collector: str, service: str, version: str, **named: str) -> None:
        """`collector` is a URL; OTLP's path is added if it has none.
        `named` are attributes of all spans. Raises ImportError."""
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = {"service.name": service, "service.version": version}
        resource |= {f"pilotlight.{name}": value for name, value in named.items()}
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(otlp_url(collector, "traces"), timeout=SEND_TIMEOUT_S))
        )
        self._tracer = self._provider.get_tracer(service, version)
        self._propagator = TraceContextTextMapPropagator()
        self._trace = trace
        self._kinds = {
            "server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT, "internal": trace.SpanKind.INTERNAL,
        }  # fmt: skip

    def start(
        self, name: str, parent: Parent, kind: Kind, attributes: Attributes, start_ns: int | None = None
    ) -> "Span":
        """Start a span. `start_ns` is nanoseconds since the epoch; None for now."""
        context = self._propagator.extract(dict(parent))
        return self._tracer.start_span(name, context, self._kinds[kind], dict(attributes), start_time=start_ns)

    def as_parent(self, span: "Span") -> dict[str, str]:
        headers: dict[str, str] = {}
        self._propagator.inject(headers, self._trace.set_span_in_context(span))
        return headers

    @contextmanager
    def within(self, name: str, parent: Parent, kind: Kind, attributes: Attributes) -> Iterator["Span"]:
        """Open a span; all work in this scope belongs to it."""
        span = self.start(name, parent, kind, attributes)
        token = CURRENT.set(self.as_parent(span))
        try:
            yield span
        except BaseException as error:
            self.fail(span, getattr(error, "word", type(error).__name__))
            raise
        finally:
            CURRENT.reset(token)
            span.end()

    def fail(self, span: "Span", why: str) -> None:
        span.set_attribute("error.type", why)
        span.set_status(self._trace.StatusCode.ERROR)

    def close(self) -> None:
        """Send the remaining spans. This waits for the collector, so do not call it in an event loop."""
        shut_down(self._provider)


def shut_down(provider: "TracerProvider | LoggerProvider") -> None:
    """Send what a provider still holds, for at most SEND_TIMEOUT_S; it loses what is left."""
    sending = Thread(target=provider.shutdown, daemon=True)
    sending.start()
    sending.join(SEND_TIMEOUT_S)
