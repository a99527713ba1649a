"""A site's spans: requests in their router's trace, generations with phases, and function invocations.

A generation is a child of its request or function. Names follow OpenTelemetry's conventions for HTTP, GenAI and functions. Spans contain no part of a
prompt or an answer. Independent of their export (wire/tracing.py).
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from starlette.types import Scope

from pilotlight.dialects.requests import Conversation, ValidGeneration
from pilotlight.runtime.telemetry.recent_generations import GenerationClock
from pilotlight.sites.config import ConfigError, TelemetryConfig
from pilotlight.wire.http.asgi import header
from pilotlight.wire.tracing import CURRENT, PARENT_HEADERS, Spans

if TYPE_CHECKING:
    from opentelemetry.trace import Span

TRACED = ("/ai/", "/v1/", "/client/", "/fn/")


class SiteTracing:
    def __init__(self, collector: str, site: str, version: str) -> None:
        """Raises ConfigError if the packages for the export are not installed."""
        try:
            self.spans = Spans(collector, "pilotlight-site", version, site=site)
        except ImportError as error:
            raise ConfigError(
                f"telemetry.otlp needs the extra packages of pilotlight-inference[telemetry]: {error}"
            ) from None

    @classmethod
    def of(cls, config: TelemetryConfig, site: str, version: str) -> "SiteTracing | None":
        return None if config.otlp is None else cls(config.otlp, site, version)

    @contextmanager
    def request(self, scope: Scope) -> Iterator["RequestSpan | None"]:
        """Open a request's span, and set it as the parent in its headers. Yields None if it is not traced."""
        path, method = str(scope["path"]), str(scope.get("method", "GET"))
        if not path.startswith(TRACED):
            yield None
            return
        parent = {name: header(scope, name) or "" for name in PARENT_HEADERS}
        attributes = {
            "http.request.method": method, "url.path": path, "pilotlight.request_id": str(scope["pilotlight.request_id"]),
        }  # fmt: skip
        with self.spans.within(f"{method} {path.split('/', 2)[1]}", parent, "server", attributes) as span:
            others = [pair for pair in scope["headers"] if pair[0].decode("latin-1") not in PARENT_HEADERS]
            ours = [(name.encode(), value.encode()) for name, value in CURRENT.get().items()]
            scope["headers"] = [*others, *ours]
            yield RequestSpan(self.spans, span)

    def invocation(self, function: str, trigger: str) -> AbstractContextManager[object]:
        """Open the span of an invocation; it ends when the response begins."""
        attributes = {"faas.name": function, "faas.trigger": trigger}
        return self.spans.within(f"invoke {function}", CURRENT.get(), "internal", attributes)

    @contextmanager
    def generation(self, request: ValidGeneration, clock: GenerationClock) -> Iterator[None]:
        """Open the span of a generation, whose phases and use `clock` has when the scope ends."""
        operation = "chat" if isinstance(request.prompt, Conversation) else "text_completion"
        attributes = {
            "gen_ai.operation.name": operation, "gen_ai.provider.name": "pilotlight", "gen_ai.request.model": request.model,
        }  # fmt: skip
        span = self.spans.start(f"{operation} {request.model}", CURRENT.get(), "internal", attributes)
        try:
            yield
        except BaseException as error:
            self.spans.fail(span, getattr(error, "word", type(error).__name__))
            raise
        finally:
            if clock.submitted_ns:
                _set_use(span, clock)
            ended_ns = time.time_ns()
            for name, start_ns, end_ns in _phases(clock, ended_ns):
                self.spans.start(name, self.spans.as_parent(span), "internal", {}, start_ns).end(end_ns)
            span.end(ended_ns)

    def close(self) -> None:
        """Export the remaining spans. It blocks, so do not call it in an event loop."""
        self.spans.close()


class RequestSpan:
    def __init__(self, spans: Spans, span: "Span") -> None:
        self._spans, self._span = spans, span

    def answered(self, status: int) -> None:
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._spans.fail(self._span, str(status))


def _phases(clock: GenerationClock, ended_ns: int) -> Iterator[tuple[str, int, int]]:
    """Yield the phases that were reached, each with its start and end.

    They are admission (until the engine gets it), queue (until its first step), prefill (until its first token) and decode."""
    submitted_ns, started_ns, first_ns = clock.engine_phases(ended_ns)
    yield "admission", clock.began_ns, submitted_ns
    if clock.submitted_ns:
        yield "queue", submitted_ns, started_ns
        yield "prefill", started_ns, first_ns
        if clock.first_output_ns:
            yield "decode", first_ns, ended_ns


def _set_use(span: "Span", clock: GenerationClock) -> None:
    use = clock.use
    span.set_attribute("gen_ai.usage.input_tokens", use.prompt)
    span.set_attribute("gen_ai.usage.cache_read.input_tokens", use.cached)
    span.set_attribute("gen_ai.usage.output_tokens", use.output)
    span.set_attribute("pilotlight.device_us", use.device_us)  # its share of the engine steps' device time
    if use.drafted:
        span.set_attribute("pilotlight.drafted_tokens", use.drafted)
        span.set_attribute("pilotlight.accepted_tokens", use.accepted)
    if clock.finish_reason is not None:
        span.set_attribute("gen_ai.response.finish_reasons", [clock.finish_reason])
