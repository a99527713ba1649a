"""What a site counts, in Prometheus' text form: the names people already chart (vllm:*), and our own (pilotlight_*).

One registry per application, so that several sites can live in one process. The module refuses to know what the figures are used for.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.protocol import StepOutput
from runtime.engines.fleet import HostLoad
from runtime.engines.slot import Wake
from wire.chat import Usage
from wire.errors import ApiError
from wire.status import ModelStatus, Residency

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_WAKE_MS = (5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10240, 20480, 40960)


class Answer(Protocol):
    """What is measured of a request: a generation, or embeddings."""

    on_piece: Callable[[int], None]  # to be called whenever a piece of a choice is handed out
    delivered_tokens: int  # of the completion, those that another site made

    @property
    def usage(self) -> Usage: ...

    @property
    def finish_reason(self) -> str | None:
        """None until it has ended by itself."""


Loads = Callable[[], Iterable[HostLoad]]


class Metrics:
    def __init__(self, site: str) -> None:
        self.registry = CollectorRegistry()
        registry, model = self.registry, ["model_name"]
        self._ttft = Histogram(
            "vllm:time_to_first_token_seconds", "Request to first piece", model, buckets=_TTFT_S, registry=registry
        )
        self._itl = Histogram(
            "vllm:inter_token_latency_seconds", "Between two pieces", model, buckets=_ITL_S, registry=registry
        )
        self._e2e = Histogram(
            "vllm:e2e_request_latency_seconds", "Request to last piece", model, buckets=_E2E_S, registry=registry
        )
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens of ended requests", model, registry=registry)
        self._cached = Counter(
            "pilotlight_cached_prompt_tokens", "Of these, found in the prefix cache", model, registry=registry
        )
        self._output = Counter("vllm:generation_tokens", "Output tokens of ended requests", model, registry=registry)
        self._ended = Counter(
            "pilotlight_requests", "Ended requests by outcome: a finish reason, an error's word, or client_left",
            ["model_name", "outcome"], registry=registry,
        )  # fmt: skip
        self._cut = Counter(
            "pilotlight_cut_sequences", "Sequences whose engine host died under them, by what became of them: continued or failed",
            ["model_name", "outcome"], registry=registry,
        )  # fmt: skip
        self._http = Counter(
            "pilotlight_http_responses", "Responses by status", ["endpoint", "status"], registry=registry
        )
        self._host_ms = Histogram(
            "pilotlight_engine_step_host_ms", "Host time of an engine step", registry=registry,
            buckets=(0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64),
        )  # fmt: skip
        self._phase_ms = Histogram(
            "pilotlight_engine_step_phase_ms", "Host time of an engine step by what it went into", ["phase"],
            registry=registry, buckets=(0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32),
        )  # fmt: skip
        self._device_ms = Histogram(
            "pilotlight_engine_step_device_ms", "Device time of an engine step", registry=registry,
            buckets=(0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        )  # fmt: skip
        self._wakes = Histogram(
            "pilotlight_wake_ms",
            "Wakes of models by clock: from disk, from host memory, with another put to sleep for it (swap), after its host died (crash), "
            "on a further device (sibling)",
            ["model_name", "clock"], registry=registry, buckets=_WAKE_MS,
        )  # fmt: skip
        self._wake_phases = Histogram(
            "pilotlight_wake_phase_ms", "What the time of wakes went into", ["clock", "phase"], registry=registry, buckets=_WAKE_MS,
        )  # fmt: skip
        self._evictions = Counter(
            "pilotlight_evictions", "Models put to sleep, by where they sleep", ["model_name", "to"], registry=registry
        )
        self._scalings = Counter(
            "pilotlight_scalings", "Further copies of a hot model that were begun (up) and given up (down)",
            ["model_name", "direction"], registry=registry,
        )  # fmt: skip
        Gauge("pilotlight_site_info", "Always 1", ["site"], registry=registry).labels(site).set(1)

    def watch(
        self, loads: Loads, gauges: dict[str, Callable[[], float]], statuses: Callable[[], Iterable[ModelStatus]]
    ) -> None:
        """Read at scrape time: the engine's own counts, the given gauges by name, where each model is."""
        self.registry.register(_LoadCollector(loads))
        self.registry.register(_ResidencyCollector(statuses))
        for name, read in gauges.items():
            Gauge(f"pilotlight_{name}", name.replace("_", " "), registry=self.registry).set_function(read)

    def step(self, step: StepOutput) -> None:
        if step.outputs:
            self._host_ms.observe(step.host_time_ms)
            self._device_ms.observe(step.device_time_ms)
            for field, milliseconds in step.phases._asdict().items():
                self._phase_ms.labels(field.removesuffix("_ms")).observe(milliseconds)

    def cut(self, model: str, outcome: str) -> None:
        self._cut.labels(model, outcome).inc()

    def wake(self, wake: Wake) -> None:
        self._wakes.labels(wake.model, wake.clock).observe(wake.ms)
        for name, seconds in wake.phases:
            self._wake_phases.labels(wake.clock, name).observe(1e3 * seconds)

    def evicted(self, model: str, where: str) -> None:
        self._evictions.labels(model, where).inc()

    def scaled(self, model: str, direction: str) -> None:
        self._scalings.labels(model, direction).inc()

    def response(self, endpoint: str, status: int) -> None:
        self._http.labels(endpoint, str(status)).inc()

    @contextmanager
    def request(self, model: str) -> Iterator["Measure"]:
        """A request's outcome, whatever it is, is counted when the scope ends."""
        measure = Measure(self, model)
        outcome = "client_left"
        try:
            yield measure
            outcome = measure.finish_reason or "client_left"
        except ApiError as error:
            outcome = error.word
            raise
        except TimeoutError:
            outcome = "request_timeout"
            raise
        except Exception as error:
            outcome = getattr(error, "code", "internal_error")
            raise
        finally:
            self._ended.labels(model, outcome).inc()
            measure.end()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Measure:
    """One request's clock."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self._began = time.monotonic()
        self._last: dict[int, float] = {}  # by choice
        self._answer: Answer | None = None

    @property
    def finish_reason(self) -> str | None:
        return self._answer.finish_reason if self._answer is not None else None

    def follow(self, answer: Answer) -> None:
        self._answer = answer
        answer.on_piece = self._note_piece

    def end(self) -> None:
        if self._answer is None:
            return
        metrics, usage = self._metrics, self._answer.usage
        metrics._prompt.labels(self._model).inc(usage.prompt_tokens)
        metrics._cached.labels(self._model).inc(usage.prompt_tokens_details.cached_tokens)
        metrics._output.labels(self._model).inc(max(0, usage.completion_tokens - self._answer.delivered_tokens))
        if self.finish_reason is not None:
            metrics._e2e.labels(self._model).observe(time.monotonic() - self._began)

    def _note_piece(self, choice: int) -> None:
        now = time.monotonic()
        if choice in self._last:
            self._metrics._itl.labels(self._model).observe(now - self._last[choice])
        elif not self._last:
            self._metrics._ttft.labels(self._model).observe(now - self._began)
        self._last[choice] = now


class _LoadCollector(Collector):
    """The engine hosts' newest frames as metrics, by the number of the device: a model's counts begin anew where it wakes."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads

    def collect(self) -> Iterable[Metric]:
        label = ["model_name", "engine"]  # vLLM numbers them, too
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences being decoded or prefilled", labels=label)
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences not started", labels=label)
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", labels=label)
        queries = CounterMetricFamily("vllm:prefix_cache_queries", "Prompt tokens looked up", labels=label)
        hits = CounterMetricFamily("vllm:prefix_cache_hits", "Prompt tokens found cached", labels=label)
        host_hits = CounterMetricFamily("pilotlight_kv_host_tier_hits", "Of these, in host memory", labels=label)
        disk_hits = CounterMetricFamily("pilotlight_kv_disk_tier_hits", "Of these, on disk", labels=label)
        losses = CounterMetricFamily(
            "pilotlight_kv_tier_losses", "Prompts for which a tier had lost or damaged a block", labels=label
        )
        preemptions = CounterMetricFamily("vllm:num_preemptions", "Sequences that gave their blocks back", labels=label)
        swaps = CounterMetricFamily("pilotlight_swaps", "Of these, with their blocks kept in host memory", labels=label)
        for device_index, name, load in self._loads():
            labels = [name, str(device_index)]
            running.add_metric(labels, load.running)
            waiting.add_metric(labels, load.waiting)
            usage.add_metric(labels, 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0)
            queries.add_metric(labels, load.prefix_queries)
            hits.add_metric(labels, load.prefix_hits)
            host_hits.add_metric(labels, load.prefix_host_hits)
            disk_hits.add_metric(labels, load.prefix_disk_hits)
            losses.add_metric(labels, load.tier_losses)
            preemptions.add_metric(labels, load.preemptions)
            swaps.add_metric(labels, load.swaps)
        return (running, waiting, usage, queries, hits, host_hits, disk_hits, losses, preemptions, swaps)


class _ResidencyCollector(Collector):
    """Where each model is: 1 for that place, 0 for the others."""

    def __init__(self, statuses: Callable[[], Iterable[ModelStatus]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "pilotlight_model_residency",
            "Where a model's weights are: 1 there, 0 elsewhere",
            labels=["model_name", "residency"],
        )
        copies = GaugeMetricFamily(
            "pilotlight_model_copies", "Devices on which a model is awake", labels=["model_name"]
        )
        for status in self._statuses():
            copies.add_metric([status.name], status.copies)
            for place in get_args(Residency):
                family.add_metric([status.name, place], float(status.residency == place))
        return (family, copies)
