"""A site with several devices, of which some may only compute prompts for the others.

These hand their KV blocks over. Each step has at most CHUNK prompt tokens and a token of every running answer, at the costs of site.py. Whether a
prompt is computed on the answering device is decided by the runtime's rule (runtime/dispatch/dispatcher.py) in closed form, with the same constants;
a test compares them. Not simulated: caches, preemption, failures, changes of roles.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple

import numpy as np

from load_tests.sim.load import Shape, site_capacity
from load_tests.sim.site import CHUNK, STEP_GROWTH, STEP_S, SiteSpec
from pilotlight.support.estimates import HAND_OVER_S, exposed_s
from pilotlight.wire.hop.status import Place

NUM_DEVICES, NUM_FOR_PROMPTS = 4, 2
PREFILL_TOKENS_PER_S = 4500.0
LINK_TOKENS_PER_S = 25_000.0  # 25 Gbit/s and 128 KiB a token: an 8B model in bfloat16
WARM_SHARE = 0.2  # the first share of requests warms up and is not measured

# Copies of the runtime's constants, because this module may not import the runtime
SHORT_TOKENS = 64
NEIGHBOUR_SHARE = 0.02

Measure = Literal["requests", "tokens"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    name: str
    num_for_prompts: int = 0  # devices that only compute prompts; 0 for no split
    balanced_by: Measure = "tokens"
    is_judged: bool = False  # whether each prompt goes to the device where its predicted cost is lower


ARRANGEMENTS = (
    Arrangement("no split"),
    Arrangement("split, by requests", NUM_FOR_PROMPTS, "requests"),
    Arrangement("split, by tokens", NUM_FOR_PROMPTS),
    Arrangement("split where it pays", NUM_FOR_PROMPTS, is_judged=True),
)


class Workload(NamedTuple):
    """Prompts without common prefixes, with log-normal lengths."""

    name: str
    prompt_tokens: float  # mean, like `output_tokens`
    output_tokens: float
    spread: float = 0.9

    def lengths(self, rng: random.Random) -> tuple[int, int]:
        return _length(rng, self.prompt_tokens, self.spread), _length(rng, self.output_tokens, 0.9)


WORKLOADS = (
    Workload("chat", 600, 220),
    Workload("documents", 5000, 340, spread=1.5),
    Workload("long answers", 250, 1000),
    Workload("long prompts, short answers", 8000, 60),
)


@dataclass(slots=True, eq=False)
class PooledSequence:
    arrived_at: float
    prompt_tokens: int
    output_tokens: int
    is_measured: bool
    left_tokens: int  # prompt tokens not computed yet
    answers: "Device"
    first_token_at: float = 0.0


@dataclass(slots=True, eq=False)
class Device:
    number: int
    prompts: deque[PooledSequence] = field(default_factory=deque)
    prompt_tokens: int = 0  # tokens of `prompts` that are not computed yet
    coming: int = 0  # sequences whose prompts other devices are computing for this one
    joined: list[PooledSequence] = field(
        default_factory=list
    )  # sequences handed over to this device, whose first token comes with its next step
    running: list[tuple[int, int, PooledSequence]] = field(default_factory=list)  # a heap, by last step
    steps: int = 0
    is_at_work: bool = False

    @property
    def num_open(self) -> int:
        return len(self.prompts) + len(self.joined) + len(self.running) + self.coming


class Found(NamedTuple):
    """Measures of one run."""

    ttft_p90_ms: float
    itl_p90_ms: float
    itl_p99_ms: float
    handed_over: float  # handed-over share of the prompts


class Pools:
    def __init__(
        self, arrangement: Arrangement, workload: Workload, link_tokens_per_s: float = LINK_TOKENS_PER_S
    ) -> None:
        self.arrangement = arrangement
        self.link_tokens_per_s = link_tokens_per_s
        self._mean_output = workload.output_tokens
        devices = [Device(number) for number in range(NUM_DEVICES)]
        self.computing = devices[: arrangement.num_for_prompts]  # devices that compute prompts for others
        self.answering = devices[arrangement.num_for_prompts :]
        self.ttft_s: list[float] = []
        self.gaps: dict[float, int] = {}  # lengths of gaps between tokens, with the count of each
        self.handed_over = 0
        self._heap: list[tuple[float, int, Device, PooledSequence | None]] = []  # ends of steps and of transfers
        self._order = 0

    def run(self, arrivals: Sequence[tuple[float, int, int]]) -> Found:
        """Simulate the arrivals. `arrivals`: (second, prompt tokens, output tokens), by time."""
        cold = WARM_SHARE * len(arrivals)
        for number, (at, prompt, output) in enumerate(arrivals):
            self._until(at)
            self._place(at, prompt, output, number >= cold)
        self._until(float("inf"))
        ttft_ms = 1000 * float(np.percentile(self.ttft_s, 90))
        return Found(ttft_ms, self._itl_ms(0.9), self._itl_ms(0.99), self.handed_over / len(arrivals))

    def _itl_ms(self, share: float) -> float:
        gaps = sorted(self.gaps.items())
        counts = np.cumsum([count for _, count in gaps])
        return 1000 * gaps[int(np.searchsorted(counts, share * counts[-1]))][0]

    def _place(self, now: float, prompt: int, output: int, is_measured: bool) -> None:
        answers = min(self.answering, key=self._work)
        sequence = PooledSequence(now, prompt, output, is_measured, prompt, answers)
        computes = answers
        if self.computing:
            other = min(self.computing, key=self._work)
            if not self.arrangement.is_judged or hand_over_pays(prompt, answers, other, self.link_tokens_per_s):
                computes = other
                answers.coming += 1
                self.handed_over += 1
        computes.prompts.append(sequence)
        computes.prompt_tokens += prompt
        self._begin_step(computes, now)

    def _work(self, device: Device) -> tuple[float, int]:
        if self.arrangement.balanced_by == "requests":
            return device.num_open, device.number
        done = device.steps
        left = sum(min(end - done, self._mean_output) for end, _, _ in device.running)
        left += self._mean_output * (device.coming + len(device.joined))
        answers_s = NEIGHBOUR_SHARE * left * STEP_S * (1 + STEP_GROWTH * len(device.running))
        return device.prompt_tokens / PREFILL_TOKENS_PER_S + answers_s, device.number

    def _until(self, until: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            now, _, device, handed_over = heappop(heap)
            if handed_over is not None:
                device.coming -= 1
                device.joined.append(handed_over)
            else:
                device.is_at_work = False
            self._begin_step(device, now)

    def _begin_step(self, device: Device, now: float) -> None:
        """Start a step and record its results, which later arrivals cannot change, with the time of its end."""
        if device.is_at_work or not (device.prompts or device.running or device.joined):
            return
        neighbours = len(device.running) + len(device.joined)
        computed, ended = self._compute_prompts(device)
        step_s = max(computed / PREFILL_TOKENS_PER_S, STEP_S if neighbours else 0.0) + STEP_S * STEP_GROWTH * neighbours
        end = now + step_s
        device.is_at_work, device.steps = True, device.steps + 1
        self.gaps[step_s] = self.gaps.get(step_s, 0) + len(device.running)
        while device.running and device.running[0][0] <= device.steps:
            heappop(device.running)
        for sequence in device.joined:
            self._first_token(device, sequence, end)
        device.joined.clear()
        for sequence in ended:
            if sequence.answers is device:
                self._first_token(device, sequence, end)
            else:
                self._push(
                    end + hand_over_s(sequence.prompt_tokens, self.link_tokens_per_s), sequence.answers, sequence
                )
        self._push(end, device, None)

    def _compute_prompts(self, device: Device) -> tuple[int, list[PooledSequence]]:
        """Return how many prompt tokens a step computes, and the sequences whose prompts end with it."""
        left, ended = CHUNK, []
        while left and device.prompts:
            first = device.prompts[0]
            tokens = min(left, first.left_tokens)
            first.left_tokens -= tokens
            left -= tokens
            if first.left_tokens == 0:
                ended.append(device.prompts.popleft())
        device.prompt_tokens -= CHUNK - left
        return CHUNK - left, ended

    def _first_token(self, device: Device, sequence: PooledSequence, at: float) -> None:
        if sequence.is_measured:
            self.ttft_s.append(at - sequence.arrived_at)
        if sequence.output_tokens > 1:
            self._order += 1
            heappush(device.running, (device.steps + sequence.output_tokens - 1, self._order, sequence))

    def _push(self, at: float, device: Device, handed_over: PooledSequence | None) -> None:
        self._order += 1
        heappush(self._heap, (at, self._order, device, handed_over))


def hand_over_pays(prompt: int, answers: Device, other: Device, link_tokens_per_s: float) -> bool:
    """Tell whether a prompt costs less on another device.

    The cost here is the prompt's time, counted again for each sequence that it delays. The cost there is its time and the part of the transfer that
    does not overlap. With no queues and a fast link: prompt x open > PREFILL_TOKENS_PER_S x HAND_OVER_S.
    """
    if prompt < SHORT_TOKENS:
        return False
    compute_s = prompt / PREFILL_TOKENS_PER_S
    here_s = answers.prompt_tokens / PREFILL_TOKENS_PER_S + compute_s * (1 + answers.num_open)
    there_s = other.prompt_tokens / PREFILL_TOKENS_PER_S + compute_s + hand_over_s(prompt, link_tokens_per_s)
    return here_s > there_s


def hand_over_s(prompt: int, link_tokens_per_s: float) -> float:
    """Return the delay that a hand-over adds after the last chunk.

    Earlier blocks are sent while it is computed.
    """
    return HAND_OVER_S + exposed_s(prompt, link_tokens_per_s, prompt / PREFILL_TOKENS_PER_S)


def arrivals(workload: Workload, load: float, requests: int, seed: int) -> list[tuple[float, int, int]]:
    """Draw a Poisson process of `load` times the highest sustainable rate of unsplit devices."""
    spec = SiteSpec("pools", Place("", 0.0, 0.0), PREFILL_TOKENS_PER_S, 10**9, 10**9, 0.0)
    capacity = NUM_DEVICES * site_capacity(spec, Shape(1.0, workload.prompt_tokens, workload.output_tokens))
    rng, now, made = random.Random(f"{seed} pools {workload.name}"), 0.0, []
    for _ in range(requests):
        now += rng.expovariate(load * capacity)
        made.append((now, *workload.lengths(rng)))
    return made


def _length(rng: random.Random, mean: float, spread: float) -> int:
    return max(8, int(rng.lognormvariate(-spread * spread / 2, spread) * mean))
