"""The effect on streams of losing a prefill host, a decode host or the KV store.

`make bench-prefill-decode-faults` runs it. One site with a host of each role and a Mooncake Store is under load: long prompts, greedy and sampled,
are handed over while other streams decode. Repeatedly, at a random moment, a host or the store's master is killed, stopped, or cut off by a packet
filter (as root; the scenario runs in a private network namespace). A process that was cut off or stopped resumes when the streams have ended, and a
killed master restarts empty. Each text must equal those of two undisturbed runs: one with cached blocks, one by a new tenant without any. Where texts
differ, the model's distribution at that point shows whether it was a tie (load_tests/ties.py). The record has the differences that were not ties, the
delay of disturbed streams, and the resources that were not released.
"""

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

import psutil
from rich.console import Console

from load_tests.faults.links import Links, can_filter, in_own_namespace
from load_tests.records import percentiles, write_record
from load_tests.site_process import SiteProcess
from load_tests.store_process import store_process
from load_tests.ties import TIE, TieJudge

MODULE = "load_tests.scenarios.prefill_decode_faults"
ENGINE: dict[str, Any] = {
    "kv_gib": 0.04, "kv_host_gib": 0.03, "standby": True, "standby_after_s": 0.5, "weights_host_gib": 0.2, "step_deadline_s": 4.0,
    "max_num_batched_tokens": 128, "scale_up_wait_s": 0,
    "hosts": [{"device": "cpu", "role": "prefill"}, {"device": "cpu", "role": "decode"}],
}  # fmt: skip
MODEL = {"name": "ember", "source": "embedded:ember"}
ROLES = ("prefill", "decode")
MASTER = "master"
HOWS = ("kill", "stop", "cut")
WORDS = ("pilot", "light", "stove", "warm", "blue", "flame", "valve", "spark")
STREAMS = 6  # concurrent streams
BACK_WITHIN_S = 60.0
GAUGES = (
    "vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc{", "pilotlight_kv_pinned_blocks{",
    "pilotlight_inflight_requests", "pilotlight_reserved_tokens",
)  # fmt: skip


class Fault(NamedTuple):
    whose: str  # role of the host that it affects, or MASTER
    how: str

    def __str__(self) -> str:
        return f"{self.whose} {self.how}"


class Answer(NamedTuple):
    prompt: list[int]
    token_ids: list[int]
    took_s: float


def main() -> None:
    in_own_namespace(MODULE, sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=12.0, help="minutes after which no further fault is injected")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    console = Console()
    has_mooncake = find_spec("mooncake") is not None
    with store_process(1.0) if has_mooncake else nullcontext() as store, Links() as links:
        engine = ENGINE if store is None else {**ENGINE, "kv_store": store, "kv_transport": "mooncake"}
        with SiteProcess("pdfaults", engine, [MODEL]) as site:
            injector = Injector(site, store, links)
            bench = Bench(site, injector, random.Random(options.seed))
            results = bench.run(options.faults, time.monotonic() + 60 * options.minutes, console)
    console.print(results)
    console.print(f"Record: {write_record('prefill-decode-faults', results)}", soft_wrap=True)


class Injector:
    """Injects faults into a site's processes and its store's master."""

    def __init__(self, site: SiteProcess, store: str | None, links: Links) -> None:
        self._site = site
        self._store = store
        self._links = links
        self.faults = [
            Fault(whose, how)
            for whose in (*ROLES, *([] if store is None else [MASTER]))
            for how in HOWS
            if how != "cut" or (store is not None and can_filter())
        ]

    @contextmanager
    def injected(self, fault: Fault) -> Iterator[None]:
        """Inject a fault for the duration of the scope.

        At its end, a stopped or cut-off process that has not been replaced resumes.
        """
        pid = self._pid(fault.whose)
        match fault.how:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
            case "cut":
                for port in _listening_ports(pid):
                    self._links.lose(f"tcp://127.0.0.1:{port}")
        try:
            yield
        finally:
            if fault.how == "stop":
                with suppress(ProcessLookupError):  # its supervisor has replaced it
                    os.kill(pid, signal.SIGCONT)
            self._links.heal()

    def is_whole(self) -> bool:
        """Tell whether every process runs and works again."""
        status = self._site.get("/status")
        engines = [process["pid"] for process in status["processes"] if process["role"] == "engine"]
        alive = all(_state(pid) not in "TZ" for pid in engines)
        return (
            len(engines) == len(ROLES) and alive and status["models"][0]["copies"] == len(ROLES) and self._has_master()
        )

    def _has_master(self) -> bool:
        return self._store is None or _listener(self._store) is not None

    def _pid(self, whose: str) -> int:
        if whose == MASTER:
            assert self._store is not None, "there is no store"
            pid = _listener(self._store)
            assert pid is not None, "the store has no master"
            return pid
        processes = self._site.get("/status")["processes"]
        return int([process["pid"] for process in processes if process["role"] == "engine"][ROLES.index(whose)])


class Bench:
    def __init__(self, site: SiteProcess, injector: Injector, draw: random.Random) -> None:
        self._site = site
        self._injector = injector
        self._draw = draw
        self._pool = ThreadPoolExecutor(STREAMS)
        self._judge: TieJudge | None = None
        self._lost: Counter[str] = Counter()  # lost streams by error message
        self._parted: list[dict[str, Any]] = []
        self._delays: dict[str, list[float]] = {}

    def run(self, num_faults: int, deadline: float, console: Console) -> dict[str, Any]:
        self._site.until(self._injector.is_whole, "both hosts have the model")
        counts = {str(fault): 0 for fault in self._injector.faults}
        for i in range(num_faults):
            if time.monotonic() > deadline:
                break
            fault = self._draw.choice(self._injector.faults)
            self._strike(i, fault)
            counts[str(fault)] += 1
            console.print(f"{i + 1}: {fault}, {len(self._parted)} parted, {self._lost.total()} lost", end="\r")
        delays = [delay for some in self._delays.values() for delay in some]
        return {
            "faults": counts,
            "streams": sum(counts.values()) * STREAMS,
            "lost": dict(self._lost),
            "parted": self._parted,
            "wrong": sum(each["margin"] > TIE for each in self._parted),
            "added_delay_s": percentiles(delays) if delays else {},
            "added_delay_s_by_fault": {name: percentiles(some) for name, some in sorted(self._delays.items())},
            "prompts_handed_over": self._metric(
                'pilotlight_prompts_placed_total{model_name="ember",where="handed_over"}'
            ),
            "from_store_tokens": self._metric("pilotlight_kv_store_hits_total{"),
            "left_behind": self._left_behind(),
        }

    def _strike(self, number: int, fault: Fault) -> None:
        """Send requests under a fault, then again without one, and record differences."""
        bodies = [self._prompt() for _ in range(STREAMS)]
        disturbed = self._ask_all(bodies, "a", fault)
        self._site.until(self._injector.is_whole, f"every process works after {fault}", BACK_WITHIN_S)
        calm = self._ask_all(bodies, "a")  # a part of each prompt is cached by now, which must not change any token
        afresh = self._ask_all(bodies, f"tenant-{number}")  # a new tenant finds nothing cached
        for body, *answers in zip(bodies, disturbed, calm, afresh, strict=True):
            self._lost.update(answer for answer in answers if isinstance(answer, str))
            whole = [answer for answer in answers if isinstance(answer, Answer)]
            for other in whole[1:]:
                if other.token_ids != whole[0].token_ids:
                    self._note_parted(fault, body, whole[0], other)
            if isinstance(answers[0], Answer) and isinstance(answers[2], Answer):
                self._delays.setdefault(str(fault), []).append(max(0.0, answers[0].took_s - answers[2].took_s))

    def _note_parted(self, fault: Fault, body: dict[str, Any], one: Answer, other: Answer) -> None:
        self._judge = self._judge or TieJudge()
        margin = self._judge.margin(one.prompt, one.token_ids, other.token_ids, body)
        self._parted.append({"fault": str(fault), "is_sampled": "seed" in body, "margin": margin})

    def _prompt(self) -> dict[str, Any]:
        words = " ".join(self._draw.choice(WORDS) + str(self._draw.randrange(10**4)) for _ in range(120))
        sampled = (
            {"temperature": 0.9, "seed": self._draw.randrange(10**6)}
            if self._draw.random() < 0.5
            else {"temperature": 0}
        )
        return {
            "model": "ember",
            "prompt": words,
            "max_tokens": 60,
            "ignore_eos": True,
            "return_token_ids": True,
            **sampled,
        }

    def _ask_all(self, bodies: list[dict[str, Any]], tenant: str, fault: Fault | None = None) -> "list[Answer | str]":
        """Return the answer or the error message of each request."""
        futures = [self._pool.submit(self._ask, body, tenant) for body in bodies]
        if fault is None:
            return [future.result(300) for future in futures]
        time.sleep(self._draw.uniform(0.0, 0.8))
        with self._injector.injected(fault):
            return [future.result(300) for future in futures]

    def _ask(self, body: dict[str, Any], tenant: str) -> "Answer | str":
        began = time.monotonic()
        try:
            (choice,) = self._site.ask(body, tenant=tenant)["choices"]
        except (RuntimeError, OSError) as error:
            return str(error)[:200]
        return Answer(choice["prompt_token_ids"], choice["token_ids"], time.monotonic() - began)

    def _metric(self, start: str) -> float:
        lines = self._site.text("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))

    def _left_behind(self) -> dict[str, float]:
        """Return every gauge after the site is idle; each should be zero."""
        with suppress(RuntimeError):  # on a timeout, the record has the remaining values
            self._site.until(lambda: not any(map(self._metric, GAUGES)), "every sequence has ended", BACK_WITHIN_S)
        return {gauge.rstrip("{"): self._metric(gauge) for gauge in GAUGES}


def _listener(address: str) -> int | None:
    """Return the id of the process that listens at HOST:PORT; None if there is none."""
    port = int(address.rpartition(":")[2])
    found = [each.pid for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.laddr.port == port]
    return found[0] if found else None


def _listening_ports(pid: int) -> list[int]:
    return [each.laddr.port for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"]


def _state(pid: int) -> str:
    """Return a process's state as the system names it, "Z" if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


if __name__ == "__main__":
    main()
