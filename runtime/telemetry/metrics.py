"""A site's metrics, with vLLM's names where it has them (vllm:*), else pilotlight_*.

Each application has its own registry, so that several sites can run in one process. Independent of how the figures are used.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, get_args

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from pilotlight.engine.api.gpu_state import GpuState, read_states
from pilotlight.engine.api.protocol import ModelLoad, StepOutput
from pilotlight.runtime.hosts.fleet import HostLoad
from pilotlight.runtime.models.wake_history import Wake
from pilotlight.wire.chat import Usage
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.status import ModelStatus, Residency

_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5, 10, 20, 40, 80)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_WAKE_MS = (5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10240, 20480, 40960)
_HOST_MS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
_PHASE_MS = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32)
_DEVICE_MS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

Loads = Callable[[], Iterable[HostLoad]]
Statuses = Callable[[], Iterable[ModelStatus]]


class Metrics:
    def __init__(self, site: str, read_gpus: Callable[[], Sequence[GpuState]] = read_states) -> None:
        self._read_gpus = read_gpus
        self.registry = CollectorRegistry()
        self.requests = RequestMetrics(self.registry)
        self.engines = EngineMetrics(self.registry)
        self._responses = Counter(
            "pilotlight_http_responses",
            "HTTP responses by endpoint and status",
            ["endpoint", "status"],
            registry=self.registry,
        )
        Gauge("pilotlight_site_info", "Always 1", ["site"], registry=self.registry).labels(site).set(1)

    def watch(self, loads: Loads, gauges: dict[str, tuple[str, Callable[[], float]]], statuses: Statuses) -> None:
        """Export more metrics at each scrape: the engine's, `gauges` and residency.

        `gauges` maps a name to its description and a function that reads the value."""
        self.registry.register(_ModelCollector(loads, statuses))
        if self._read_gpus():
            self.registry.register(_GpuCollector(self._read_gpus))
        for name, (meaning, read) in gauges.items():
            Gauge(f"pilotlight_{name}", meaning, registry=self.registry).set_function(read)

    def watch_certificate(self, read: Callable[[], float]) -> None:
        about = "Unix time at which the certificate of this listener expires"
        Gauge("pilotlight_certificate_ends_seconds", about, registry=self.registry).set_function(read)

    def watch_function_logs(self, num_dropped: Callable[[], Mapping[str, int]]) -> None:
        """Export the number of dropped records of functions' logs, by destination."""
        self.registry.register(_LogCollector(num_dropped))

    def response(self, endpoint: str, status: int) -> None:
        self._responses.labels(endpoint, status).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class RequestMetrics:
    """Durations, tokens and outcomes of requests, by model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, times = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        model = ["model_name"]
        self.ttft = times(
            "vllm:time_to_first_token_seconds", "Time from the request to the first token", model, buckets=_TTFT_S
        )
        self.itl = times("vllm:inter_token_latency_seconds", "Time between two tokens", model, buckets=_ITL_S)
        self.e2e = times(
            "vllm:e2e_request_latency_seconds", "Time from the request to the last token", model, buckets=_E2E_S
        )
        self.prompt = counter("vllm:prompt_tokens", "Prompt tokens of ended requests", model)
        self.cached = counter(
            "pilotlight_cached_prompt_tokens", "Prompt tokens of ended requests that were in the prefix cache", model
        )
        self.output = counter("vllm:generation_tokens", "Output tokens of ended requests", model)
        about = "Ended requests by outcome: a finish reason, an error's word, or client_left"
        self.ended = counter("pilotlight_requests", about, [*model, "outcome"])

    @contextmanager
    def measure(self, model: str) -> Iterator["Measure"]:
        """Open a request's scope; count its outcome when the scope ends."""
        measure = Measure(self, model, time.monotonic())
        outcome = "client_left"
        try:
            yield measure
            if measure.answer is not None:
                outcome = measure.answer.finish_reason or outcome
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
            self.ended.labels(model, outcome).inc()
            measure.end()


class Measured(Protocol):
    """An answer whose tokens are counted: a generation, embeddings or decisions."""

    @property
    def usage(self) -> Usage: ...

    @property
    def delivered_tokens(self) -> int:
        """Completion tokens that another site generated."""

    @property
    def finish_reason(self) -> str | None:
        """The finish reason; None until the answer has ended by itself."""


class Measure(msgspec.Struct, eq=False):
    """The measurement of one request."""

    metrics: RequestMetrics
    model: str
    began: float  # time.monotonic() at the request's start
    last: dict[int, float] = {}  # time of the last delta by choice
    answer: Measured | None = None  # the answer whose tokens are counted at the end

    def note_delta(self, choice: int) -> None:
        """Record the time of a choice's delta."""
        now = time.monotonic()
        if choice in self.last:
            self.metrics.itl.labels(self.model).observe(now - self.last[choice])
        elif not self.last:
            self.metrics.ttft.labels(self.model).observe(now - self.began)
        self.last[choice] = now

    def end(self) -> None:
        if self.answer is None:
            return
        metrics, model, usage = self.metrics, self.model, self.answer.usage
        metrics.prompt.labels(model).inc(usage.prompt_tokens)
        metrics.cached.labels(model).inc(usage.prompt_tokens_details.cached_tokens)
        metrics.output.labels(model).inc(max(0, usage.completion_tokens - self.answer.delivered_tokens))
        if self.answer.finish_reason is not None:
            metrics.e2e.labels(model).observe(time.monotonic() - self.began)


class EngineMetrics:
    """Metrics of engine steps, and of wakes, evictions and lost sequences."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, times = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        about = "Sequences that lost their engine host, by outcome: continued or failed"
        self._cut = counter("pilotlight_cut_sequences", about, ["model_name", "outcome"])
        about = "Prompts by the host that computes them, where there is a choice: handed_over (another one) or here (the one that answers)"
        self._placed = counter("pilotlight_prompts_placed", about, ["model_name", "where"])
        self._host_ms = times("pilotlight_engine_step_host_ms", "Host time of an engine step", buckets=_HOST_MS)
        about = "Host time of an engine step by phase"
        self._phase_ms = times("pilotlight_engine_step_phase_ms", about, ["phase"], buckets=_PHASE_MS)
        self._device_ms = times("pilotlight_engine_step_device_ms", "Device time of an engine step", buckets=_DEVICE_MS)
        about = (
            "Duration of wakes by kind: from disk, from host memory, after another model was put to sleep (swap), after the host died "
            "(crash), on one more device (sibling)"
        )
        self._wakes = times("pilotlight_wake_ms", about, ["model_name", "clock"], buckets=_WAKE_MS)
        about = "Duration of the phases of wakes"
        self._wake_phases = times("pilotlight_wake_phase_ms", about, ["clock", "phase"], buckets=_WAKE_MS)
        about = "Models put to sleep, by where their weights are then"
        self._evictions = counter("pilotlight_evictions", about, ["model_name", "to"])
        about = "Extra copies of a busy model, started (up) and stopped (down)"
        self._scalings = counter("pilotlight_scalings", about, ["model_name", "direction"])

    def step(self, step: StepOutput) -> None:
        if step.outputs:
            self._host_ms.observe(step.host_time_ms)
            self._device_ms.observe(step.device_time_ms)
            for field, milliseconds in msgspec.structs.asdict(step.phases).items():
                self._phase_ms.labels(field.removesuffix("_ms")).observe(milliseconds)

    def cut(self, model: str, outcome: str) -> None:
        self._cut.labels(model, outcome).inc()

    def placed(self, model: str, where: str) -> None:
        self._placed.labels(model, where).inc()

    def wake(self, wake: Wake) -> None:
        self._wakes.labels(wake.model, wake.clock).observe(wake.ms)
        for name, seconds in wake.phases:
            self._wake_phases.labels(wake.clock, name).observe(1e3 * seconds)

    def evicted(self, model: str, where: str) -> None:
        self._evictions.labels(model, where).inc()

    def scaled(self, model: str, direction: str) -> None:
        self._scalings.labels(model, direction).inc()


class _GpuCollector:
    """The machine's GPUs, as reported by their driver at each scrape."""

    def __init__(self, read: Callable[[], Sequence[GpuState]]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        states = self._read()
        for name in sorted({name for state in states for name in state}):
            family = GaugeMetricFamily(f"pilotlight_gpu_{name}", name.replace("_", " "), labels=["gpu"])
            for number, state in enumerate(states):
                if name in state:
                    family.add_metric([str(number)], state[name])
            yield family


class _LogCollector:
    """Records of functions' logs that were dropped."""

    def __init__(self, num_dropped: Callable[[], Mapping[str, int]]) -> None:
        self._num_dropped = num_dropped

    def collect(self) -> Iterator[CounterMetricFamily]:
        about = "Records of functions' logs that were dropped because the disk, the collector or a tail consumer does not keep up"
        family = CounterMetricFamily("pilotlight_function_log_records_dropped", about, labels=["destination"])
        for destination, count in self._num_dropped().items():
            family.add_metric([destination], count)
        yield family


class _ModelCollector:
    """The newest counts of the engine hosts, and the residency of each model."""

    def __init__(self, loads: Loads, statuses: Statuses) -> None:
        self._loads, self._statuses = loads, statuses

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        yield from self._of_loads()
        yield from self._of_residency()

    def _of_loads(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield a model's counts with the device's number as a label.
        Counts of a device start at zero when the model wakes there."""
        found = [((name, str(device_index)), load) for device_index, name, load in self._loads()]
        for kind, name, about, read in _OF_LOADS:
            family = kind(name, about, labels=["model_name", "engine"])  # the label `engine` is a number, as in vLLM
            for labels, load in found:
                family.add_metric(labels, read(load))
            yield family
        corrupt = CounterMetricFamily(
            "pilotlight_kv_corrupt_blocks",
            "Damaged KV blocks of all models that were detected before their use and computed again",
            labels=["model_name", "engine", "tier"],
        )
        for labels, load in found:
            for tier, num_blocks in msgspec.structs.asdict(load.corrupt_blocks).items():
                corrupt.add_metric([*labels, tier], num_blocks)
        yield corrupt
        name, about = (
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in a step's drafts",
        )
        by_position = CounterMetricFamily(name, about, labels=["model_name", "engine", "position"])
        for labels, load in found:
            for position, accepted in enumerate(load.drafts.accepted_per_position):
                by_position.add_metric([*labels, str(position)], accepted)
        yield by_position

    def _of_residency(self) -> Iterator[GaugeMetricFamily]:
        about = "1 for the place where a model's weights are, 0 for others"
        places = GaugeMetricFamily("pilotlight_model_residency", about, labels=["model_name", "residency"])
        about = "Devices on which a model is awake"
        copies = GaugeMetricFamily("pilotlight_model_copies", about, labels=["model_name"])
        for status in self._statuses():
            copies.add_metric([status.name], status.copies)
            for place in get_args(Residency):
                places.add_metric([status.name, place], status.residency == place)
        yield places
        yield copies


def _kv_usage(load: ModelLoad) -> float:
    return 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0


_Family = type[CounterMetricFamily] | type[GaugeMetricFamily]
_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily
_OF_LOADS: tuple[tuple[_Family, str, str, Callable[[ModelLoad], float]], ...] = (
    (_GAUGE, "vllm:num_requests_running", "Sequences that are running", lambda load: load.running),
    (_GAUGE, "vllm:num_requests_waiting", "Sequences that wait to start", lambda load: load.waiting),
    (_GAUGE, "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", _kv_usage),
    (_COUNTER, "vllm:prefix_cache_queries", "Prompt tokens looked up", lambda load: load.prefix_queries),
    (_COUNTER, "vllm:prefix_cache_hits", "Prompt tokens found cached", lambda load: load.prefix_hits),
    (_COUNTER, "pilotlight_kv_host_tier_hits", "Prompt tokens found in the host memory tier", lambda load: load.prefix_host_hits),
    (_COUNTER, "pilotlight_kv_disk_tier_hits", "Prompt tokens found in the disk tier", lambda load: load.prefix_disk_hits),
    (_COUNTER, "pilotlight_kv_store_hits", "Prompt tokens found in the shared store", lambda load: load.prefix_store_hits),
    (_COUNTER, "pilotlight_kv_peer_hits", "Prompt tokens fetched from another host", lambda load: load.prefix_peer_hits),
    (_GAUGE, "pilotlight_kv_pinned_blocks", "KV blocks of all models in host memory that a transfer has pinned", lambda load: load.pinned_blocks),
    (_COUNTER, "pilotlight_kv_tier_losses", "Prompts for which a cache tier had lost or damaged a block", lambda load: load.tier_losses),
    (_COUNTER, "pilotlight_adapter_loads", "Adapters loaded onto the device", lambda load: load.adapter_loads),
    (_COUNTER, "pilotlight_image_encodes", "Images that were encoded", lambda load: load.image_encodes),
    (_COUNTER, "pilotlight_image_hits", "Images whose encoding was cached", lambda load: load.image_hits),
    (_GAUGE, "pilotlight_recorded_steps", "Step sizes that are recorded and replayed with one launch", lambda load: load.num_graphs),
    (_COUNTER, "pilotlight_recording_failures", "Failed attempts to record a step size, which is then launched operation by operation",
     lambda load: load.graph_failures),
    (_COUNTER, "vllm:num_preemptions", "Sequences that were preempted", lambda load: load.preemptions),
    (_COUNTER, "vllm:spec_decode_num_drafts", "Verifications of a sequence's drafts", lambda load: load.drafts.num_drafts),
    (_COUNTER, "vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified", lambda load: load.drafts.num_draft_tokens),
    (_COUNTER, "vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted", lambda load: load.drafts.num_accepted_tokens),
    (_COUNTER, "pilotlight_drafter_failures", "Drafters that failed, were slow or proposed invalid tokens, and were switched off for a sequence",
     lambda load: load.drafts.num_failures),
    (_COUNTER, "pilotlight_swaps", "Preempted sequences whose blocks were kept in host memory", lambda load: load.swaps),
)  # fmt: skip
