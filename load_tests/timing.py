"""Timing of work on a device, within a budget for the whole measurement.

Host time is wall time with the device idle before and after, as a user sees it. Device time is what CUDA events measure for calls recorded as one
graph, so that no host work lies between them. Independent of the timed work.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Work = Callable[[], object]


class Budget:
    """A time budget that is shared equally among jobs.

    A job that starts late gets less time; none is skipped.
    """

    def __init__(self, seconds: float, jobs: int) -> None:
        self._end = time.monotonic() + seconds
        self._jobs = jobs

    def next_share_s(self) -> float:
        """Return the share of the next job, at least zero."""
        share = max(0.0, self._end - time.monotonic()) / max(1, self._jobs)
        self._jobs -= 1
        return share


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_times_s(device: torch.device, work: Work, repeats: int, warm_ups: int = 1) -> list[float]:
    times = []
    for repeat in range(warm_ups + repeats):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        if repeat >= warm_ups:
            times.append(time.perf_counter() - started)
    return times


def median_s(device: torch.device, work: Work, repeats: int = 10, warm_ups: int = 6) -> float:
    return statistics.median(host_times_s(device, work, repeats, warm_ups))


class Timed(NamedTuple):
    times_s: list[float]  # time of one call, for each round
    how: str


class Contender:
    """Some calls of one implementation, ready to run in rounds: as a CUDA graph if they can be recorded."""

    def __init__(self, device: torch.device, calls: Sequence[Work]) -> None:
        self._device = device
        self._calls = calls
        self._graph = _recorded(calls) if device.type == "cuda" else None
        self.how = "wall clock" if device.type != "cuda" else "CUDA graph" if self._graph is not None else "CUDA events"

    def round_s(self) -> float:
        """Run one round; return seconds per call."""
        if self._device.type != "cuda":
            return host_times_s(self._device, self._run, repeats=1, warm_ups=0)[0] / len(self._calls)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        if self._graph is None:
            # The device waits for about a millisecond, so that the host gets ahead of it.
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
        begin.record()
        self._run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / len(self._calls)

    def _run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for call in self._calls:
            call()


def take_turns(contenders: dict[str, Contender], share_s: float, most: int, least: int = 3) -> dict[str, Timed]:
    """Run rounds until the share is used up, every contender once in each.

    So a change of clock rates affects all equally.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.monotonic() + share_s
    for contender in contenders.values():
        contender.round_s()
    for number in range(most):
        if number >= least and time.monotonic() > end:
            break
        for name, contender in contenders.items():
            times[name].append(contender.round_s())
    return {name: Timed(times[name], contender.how) for name, contender in contenders.items()}


def _recorded(calls: Sequence[Work]) -> torch.cuda.CUDAGraph | None:
    """Record the calls as a graph; None if a call waits for the device, which a graph cannot."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # first calls compile and allocate, which a recording forbids
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph
