"""What a site counts, by the names people already chart (vllm:*) and our own (pilotlight_*).

One set per application, so that several sites can live in one process. The module refuses to know what the figures are used for, and how they are
written (series.py).
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, get_args

from engine.protocol import ModelLoad, StepOutput
from runtime.engines.fleet import HostLoad
from runtime.engines.slot import Wake
from runtime.series import Counter, Histogram, Kind, Labels, Samples, Series, scrape
from wire.chat import Usage
from wire.errors import ApiError
from wire.status import ModelStatus, Residency

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
        model = ["model_name"]
        self._ttft = Histogram("vllm:time_to_first_token_seconds", "Request to first piece", model, bounds=_TTFT_S)
        self._itl = Histogram("vllm:inter_token_latency_seconds", "Between two pieces", model, bounds=_ITL_S)
        self._e2e = Histogram("vllm:e2e_request_latency_seconds", "Request to last piece", model, bounds=_E2E_S)
        self._prompt = Counter("vllm:prompt_tokens", "Prompt tokens of ended requests", model)
        self._cached = Counter("pilotlight_cached_prompt_tokens", "Of these, found in the prefix cache", model)
        self._output = Counter("vllm:generation_tokens", "Output tokens of ended requests", model)
        self._ended = Counter(
            "pilotlight_requests",
            "Ended requests by outcome: a finish reason, an error's word, or client_left",
            ["model_name", "outcome"],
        )
        self._cut = Counter(
            "pilotlight_cut_sequences",
            "Sequences whose engine host died under them, by what became of them: continued or failed",
            ["model_name", "outcome"],
        )
        self._http = Counter("pilotlight_http_responses", "Responses by status", ["endpoint", "status"])
        self._host_ms = Histogram(
            "pilotlight_engine_step_host_ms",
            "Host time of an engine step",
            bounds=(0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64),
        )
        self._phase_ms = Histogram(
            "pilotlight_engine_step_phase_ms", "Host time of an engine step by what it went into", ["phase"],
            bounds=(0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32),
        )  # fmt: skip
        self._device_ms = Histogram(
            "pilotlight_engine_step_device_ms", "Device time of an engine step",
            bounds=(0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
        )  # fmt: skip
        self._wakes = Histogram(
            "pilotlight_wake_ms",
            "Wakes of models by clock: from disk, from host memory, with another put to sleep for it (swap), after its host died (crash), "
            "on a further device (sibling)",
            ["model_name", "clock"],
            bounds=_WAKE_MS,
        )
        self._wake_phases = Histogram(
            "pilotlight_wake_phase_ms", "What the time of wakes went into", ["clock", "phase"], bounds=_WAKE_MS
        )
        self._evictions = Counter(
            "pilotlight_evictions", "Models put to sleep, by where they sleep", ["model_name", "to"]
        )
        self._scalings = Counter(
            "pilotlight_scalings",
            "Further copies of a hot model that were begun (up) and given up (down)",
            ["model_name", "direction"],
        )
        self._series: list[Series] = [
            self._ttft, self._itl, self._e2e, self._prompt, self._cached, self._output, self._ended, self._cut, self._http,
            self._host_ms, self._phase_ms, self._device_ms, self._wakes, self._wake_phases, self._evictions, self._scalings,
            Samples("pilotlight_site_info", "Always 1", "gauge", ["site"], [((site,), 1.0)]),
        ]  # fmt: skip
        self._watched: list[Callable[[], Iterable[Series]]] = []

    def watch(
        self, loads: Loads, gauges: dict[str, Callable[[], float]], statuses: Callable[[], Iterable[ModelStatus]]
    ) -> None:
        """Read at scrape time: the engine's own counts, the given gauges by name, where each model is."""
        self._watched += (
            lambda: _of_loads(loads),
            lambda: _of_residency(statuses),
            lambda: [
                Samples(f"pilotlight_{name}", name.replace("_", " "), "gauge", (), [((), read())])
                for name, read in gauges.items()
            ],
        )

    def step(self, step: StepOutput) -> None:
        if step.outputs:
            self._host_ms.observe((), step.host_time_ms)
            self._device_ms.observe((), step.device_time_ms)
            for field, milliseconds in step.phases._asdict().items():
                self._phase_ms.observe((field.removesuffix("_ms"),), milliseconds)

    def cut(self, model: str, outcome: str) -> None:
        self._cut.add((model, outcome))

    def wake(self, wake: Wake) -> None:
        self._wakes.observe((wake.model, wake.clock), wake.ms)
        for name, seconds in wake.phases:
            self._wake_phases.observe((wake.clock, name), 1e3 * seconds)

    def evicted(self, model: str, where: str) -> None:
        self._evictions.add((model, where))

    def scaled(self, model: str, direction: str) -> None:
        self._scalings.add((model, direction))

    def response(self, endpoint: str, status: int) -> None:
        self._http.add((endpoint, str(status)))

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
            self._ended.add((model, outcome))
            measure.end()

    def text(self) -> bytes:
        """A scrape."""
        watched = (series for read in self._watched for series in read())
        return scrape((*self._series, *watched))


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
        metrics._prompt.add((self._model,), usage.prompt_tokens)
        metrics._cached.add((self._model,), usage.prompt_tokens_details.cached_tokens)
        metrics._output.add((self._model,), max(0, usage.completion_tokens - self._answer.delivered_tokens))
        if self.finish_reason is not None:
            metrics._e2e.observe((self._model,), time.monotonic() - self._began)

    def _note_piece(self, choice: int) -> None:
        now = time.monotonic()
        if choice in self._last:
            self._metrics._itl.observe((self._model,), now - self._last[choice])
        elif not self._last:
            self._metrics._ttft.observe((self._model,), now - self._began)
        self._last[choice] = now


def _of_loads(loads: Loads) -> list[Series]:
    """The engine hosts' newest frames, by the number of the device: a model's counts begin anew where it wakes."""
    found = [((name, str(device_index)), load) for device_index, name, load in loads()]

    def samples(name: str, about: str, kind: Kind, read: Callable[[ModelLoad], float]) -> Series:
        values = [(labels, read(load)) for labels, load in found]
        return Samples(name, about, kind, ["model_name", "engine"], values)  # vLLM numbers them, too

    return [
        samples("vllm:num_requests_running", "Sequences being decoded or prefilled", "gauge", lambda load: load.running),
        samples("vllm:num_requests_waiting", "Sequences not started", "gauge", lambda load: load.waiting),
        samples("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", "gauge", _kv_usage),
        samples("vllm:prefix_cache_queries_total", "Prompt tokens looked up", "counter", lambda load: load.prefix_queries),
        samples("vllm:prefix_cache_hits_total", "Prompt tokens found cached", "counter", lambda load: load.prefix_hits),
        samples("pilotlight_kv_host_tier_hits_total", "Of these, in host memory", "counter", lambda load: load.prefix_host_hits),
        samples("pilotlight_kv_disk_tier_hits_total", "Of these, on disk", "counter", lambda load: load.prefix_disk_hits),
        samples(
            "pilotlight_kv_tier_losses_total", "Prompts for which a tier had lost or damaged a block", "counter",
            lambda load: load.tier_losses,
        ),
        samples(
            "vllm:num_preemptions_total", "Sequences that gave their blocks back", "counter", lambda load: load.preemptions
        ),
        samples("pilotlight_swaps_total", "Of these, with their blocks kept in host memory", "counter", lambda load: load.swaps),
    ]  # fmt: skip


def _kv_usage(load: ModelLoad) -> float:
    return 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0


def _of_residency(statuses: Callable[[], Iterable[ModelStatus]]) -> list[Series]:
    """Where each model is: 1 for that place, 0 for the others."""
    places: list[tuple[Labels, float]] = []
    copies: list[tuple[Labels, float]] = []
    for status in statuses():
        copies.append(((status.name,), status.copies))
        places.extend(((status.name, place), status.residency == place) for place in get_args(Residency))
    about = "Where a model's weights are: 1 there, 0 elsewhere"
    return [
        Samples("pilotlight_model_residency", about, "gauge", ["model_name", "residency"], places),
        Samples("pilotlight_model_copies", "Devices on which a model is awake", "gauge", ["model_name"], copies),
    ]
