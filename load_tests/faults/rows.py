"""Row: one fault, applied to a network with open streams, and its allowed effects on clients.

`run_row` compares every stream with its undisturbed run. The row fails if there is any other effect.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from load_tests.faults.links import Links
from load_tests.faults.members import Differently, ScatteredNetwork
from load_tests.scenarios.site_death import Heard, listen, requests

PAUSE_S = 5.0
WARM_EVENTS = 200  # streams have this many events in all when the fault strikes


@dataclass
class Strike:
    """The network and its streams, as passed to a fault."""

    network: ScatteredNetwork
    links: Links
    heard: Sequence[Heard]
    notes: dict[str, Any] = field(default_factory=dict)  # further facts for the record
    failure: str | None = None  # the fault itself found an error, or could not be applied

    def busiest(self) -> str:
        """Return the site with the most open streams."""
        from collections import Counter

        sites = Counter(mine.site for mine in self.heard if mine.site and not mine.is_done)
        return sites.most_common(1)[0][0] if sites else next(iter(self.network.site_urls))


Fault = Callable[[Strike], None]


@dataclass(frozen=True)
class Row:
    name: str
    fault: Fault  # runs in a thread beside the streams; it also undoes the fault
    differently: Mapping[str, Differently] = field(default_factory=dict)
    names: Sequence[str] | None = None  # names of the sites; all three if unset
    expected: Sequence[str] | None = None  # sites that start; all if unset
    streams: int = 18
    max_tokens: int = 240
    before: Fault | None = None  # runs before any stream, for faults that exist from the start
    pause_s: float = PAUSE_S  # the longest allowed pause of a stream, including a freeze of the router itself
    pause_beside_s: float = 0.0  # additional pause in a pair, whose other fault may have killed the standbys
    may_be_cut: bool = False  # streams may end with an error or incomplete, but never complete with other tokens
    may_be_refused: bool = False  # requests may get 429 and 503, no other error
    ends_healthy: bool = True
    needs_filter: bool = False
    needs_workers: bool = False  # the router has several


def run_row(row: Row, expected: Sequence[Heard], bodies: Sequence[dict[str, Any]], workers: int = 1) -> dict[str, Any]:
    began = time.monotonic()
    try:
        with (
            ScatteredNetwork(row.differently, row.names, row.expected, workers=workers) as network,
            Links() as links,
        ):
            return {**_under_fault(row, network, links, expected, bodies), "row_s": round(time.monotonic() - began, 1)}
    except Exception as error:  # the row failed; the next one follows
        return {
            "fault": row.name,
            "wrong": [f"{type(error).__name__}: {error}"[-1500:]],
            "row_s": round(time.monotonic() - began, 1),
        }


def undisturbed(streams: int, max_tokens: int) -> tuple[list[dict[str, Any]], list[Heard]]:
    bodies = requests(streams, max_tokens)
    with ScatteredNetwork() as network:
        return bodies, asyncio.run(listen(network.url, bodies, lambda heard: None))


def _under_fault(
    row: Row, network: ScatteredNetwork, links: Links, expected: Sequence[Heard], bodies: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    strike = Strike(network, links, [])
    if row.before is not None:
        row.before(strike)
    times: list[float] = []
    thread = threading.Thread(target=_struck, args=(row.fault, strike, times), daemon=True)

    def on_event(heard: list[Heard]) -> None:
        strike.heard = heard
        has_started = all(mine.arrivals_s or mine.error for mine in heard)
        if thread.ident is None and has_started and sum(len(mine.arrivals_s) for mine in heard) >= WARM_EVENTS:
            times.append(time.perf_counter())
            thread.start()

    heard = asyncio.run(listen(network.url, bodies, on_event))
    if thread.ident is None:
        strike.heard = heard
        times.append(time.perf_counter())
        thread.start()
    thread.join(120)
    links.heal()
    result = judge(row, heard, expected, times[0])
    result["notes"] = strike.notes
    result["wrong"] += [strike.failure] if strike.failure is not None else []
    if row.ends_healthy:
        recovered = time.monotonic()
        network.wait_until_up(row.expected)
        result["recovery_s"] = round(time.monotonic() - recovered, 1)
        result["wrong"] += still_held(network)
    return result


def _struck(fault: Fault, strike: Strike, times: list[float]) -> None:
    try:
        fault(strike)
    except Exception as error:
        strike.failure = f"{type(error).__name__}: {error}"


def judge(row: Row, heard: Sequence[Heard], expected: Sequence[Heard], at_s: float) -> dict[str, Any]:
    same = cut = refused = 0
    wrong: list[str] = []
    for number, (mine, whole) in enumerate(zip(heard, expected, strict=True)):
        if mine.is_done and mine.error is None:
            if mine.answer == whole.answer:
                same += 1
            else:
                wrong.append(f"stream {number}: {difference(mine, whole)}")
        elif not mine.arrivals_s and mine.error is not None:
            refused += 1
            if not (row.may_be_refused or row.may_be_cut):
                wrong.append(f"stream {number} was refused: {mine.error}")
        else:
            cut += 1
            if not row.may_be_cut:
                wrong.append(f"stream {number} ended with {mine.error or 'nothing'}")
    pauses = [pause for mine in heard if (pause := mine.pause_s(at_s)) is not None]
    longest = max(pauses, default=0.0)
    if longest > row.pause_s:
        wrong.append(f"a stream paused for {longest:.1f} s")
    return {
        "fault": row.name, "streams": len(heard), "same": same, "cut": cut, "refused": refused,
        "longest_pause_s": round(longest, 2), "allowed_pause_s": row.pause_s, "wrong": wrong,
    }  # fmt: skip


def difference(mine: Heard, whole: Heard) -> str:
    """Describe where an answer differs."""
    for name in ("text", "calls", "finish", "tokens", "usage"):
        ours, theirs = getattr(mine, name), getattr(whole, name)
        if ours == theirs:
            continue
        if name == "text":
            number = next(n for n in theirs if ours.get(n) != theirs[n])
            ours, theirs = ours.get(number, ""), theirs[number]
            at = next(
                (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
            )
            return f"the text differs from character {at} of {len(theirs)} on: {ours[at : at + 60]!r}, not {theirs[at : at + 60]!r}"
        return f"other {name}: {ours}, not {theirs}"[:300]
    return "the same"


def still_held(network: ScatteredNetwork, timeout_s: float = 60.0) -> list[str]:
    """Return the counters of work that are not at zero when the network is idle."""
    deadline = time.monotonic() + timeout_s
    while True:
        held = []
        for name in network.site_urls:
            try:
                status = network.site_status(name)
            except OSError:
                continue  # a site that is down on purpose
            held += [f"{name}: {status.inflight} requests"] if status.inflight else []
            held += [f"{name}: {model.name} runs {model.running}" for model in status.models if model.running]
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.2)
