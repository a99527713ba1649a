"""The effect of a burst of long prompts on open streams. `make bench-prefill-decode` runs it.

python -m load_tests.scenarios.prefill_decode

32 streams decode, and prompts of 4,096 to 8,192 tokens arrive at random times, however busy the hosts are (open loop, the same sequence each time).
One configuration is a prefill host and a decode host with one core each. The others are one host with two cores, with the default or another cap of
prompt tokens per step. The weights of a 0.5 B shape are random. The plot shows throughput and inter-token latency of each configuration.
"""

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Callable
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from load_tests.random_checkpoint import Shape, write
from load_tests.records import percentiles, write_record
from load_tests.scatter import Point, draw
from load_tests.site_process import SiteProcess

SHAPES = {"0.5b": Shape(1024, 4096, 28, 16, 8, 64, 16_384), "50m": Shape(512, 1536, 8, 8, 4, 64, 16_384)}
CAPS = (64, 128, 256, 512, 1024)  # caps of prompt tokens per step, whether the step has decodes or not
NO_DELAY_LIMIT_MS = 1e6
LAST_PROMPT_S = 15.0  # no prompt arrives in these last seconds of a run: it would get most of its tokens after the end
COMMON = {"kv_gib": 6.0, "standby": False, "weights_host_gib": 4.0, "scale_up_wait_s": 0, "max_waiting": 4096}
ROLES = [{"device": "cpu", "role": "prefill"}, {"device": "cpu", "role": "decode"}]


class Way(NamedTuple):
    """A configuration of the site's hosts."""

    name: str
    engine: dict[str, Any]


class LongPrompt(NamedTuple):
    at_s: float
    token_ids: list[int]


def ways() -> list[Way]:
    one = {"device": "cpu", "threads": 2}
    capped = [
        Way(f"{cap} a step", {**one, "max_num_batched_tokens": cap, "max_decode_delay_ms": NO_DELAY_LIMIT_MS})
        for cap in CAPS
    ]
    split = {"hosts": ROLES, "threads": 1, "kv_gib": 3.0, "kv_host_gib": 2.0, "max_num_batched_tokens": 512}
    return [Way("default", one), *capped, Way("split", split)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--seconds", type=float, default=75.0, help="of each way")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompts-per-minute", type=float, default=2.0)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(4096, 8192))
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="ways by name")
    parser.add_argument("--plot", type=Path, default=Path("docs/prefill-decode.svg"))
    options = parser.parse_args()
    console = Console()
    results: dict[str, Any] = {
        "shape": options.shape,
        "streams": options.streams,
        "seconds": options.seconds,
        "ways": {},
    }
    results |= {"prompts_per_minute": options.prompts_per_minute, "prompt_tokens": list(options.prompt_tokens)}
    with tempfile.TemporaryDirectory(prefix="pilotlight-bench-") as folder:
        model = write(Path(folder) / options.shape, SHAPES[options.shape])
        for way in ways():
            if options.only and way.name not in options.only:
                continue
            with console.status(way.name):
                results["ways"][way.name] = Load(options, model).run(way)
            show(console, results)
    points = [
        Point(name, found["tokens_per_s"], found["itl_ms"]["p99"], 0 if name == "split" else 1)
        for name, found in results["ways"].items()
    ]
    options.plot.write_text(draw("p99 between two tokens, ms, over tokens per second", points))
    console.print(f"Record: {write_record('prefill-decode', results)}", soft_wrap=True)


class Load:
    """The streams and the long prompts of one run."""

    def __init__(self, options: argparse.Namespace, model: Path) -> None:
        self._options = options
        self._model = model
        self._lock = threading.Lock()
        self._gaps_ms: list[float] = []
        self._ttft_ms: list[float] = []
        self._output_tokens = self._prompt_tokens = 0
        self._failures: list[str] = []
        self._ends_at = 0.0

    def run(self, way: Way) -> dict[str, Any]:
        options = self._options
        with SiteProcess("bench-pd", {**COMMON, **way.engine}, [{"name": "m", "source": str(self._model)}]) as site:
            site.until(lambda: site.get("/readyz")["status"] == "ready", "the site is ready")
            num_hosts = len(way.engine.get("hosts", ())) or 1
            site.until(lambda: site.get("/status")["models"][0]["copies"] == num_hosts, "every host has the model")
            began = time.time()
            self._ends_at = began + options.seconds
            threads = [self._thread(self._decode, site, i) for i in range(options.streams)]
            threads += [self._thread(self._prefill, site, began, prompt) for prompt in self._prompts()]
            for thread in threads:
                thread.join(max(0.0, self._ends_at + LAST_PROMPT_S - time.time()))
            unanswered = sum(thread.is_alive() for thread in threads[options.streams :])
            return {
                "itl_ms": percentiles(self._gaps_ms),
                "itl_p90_ms": round(sorted(self._gaps_ms)[int(0.9 * (len(self._gaps_ms) - 1))], 3),
                "ttft_ms": percentiles(self._ttft_ms) if self._ttft_ms else {},
                "tokens_per_s": round((self._output_tokens + self._prompt_tokens) / options.seconds, 1),
                "output_tokens_per_s": round(self._output_tokens / options.seconds, 1),
                "prompt_tokens_per_s": round(self._prompt_tokens / options.seconds, 1),
                "unanswered_prompts": unanswered,  # prompts are abandoned a few seconds after the end
                "failures": list(self._failures),
                "handed_over": _handed_over(site),
            }

    def _thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(target, *arguments), daemon=True)
        thread.start()
        return thread

    def _guarded(self, target: Callable[..., None], *arguments: object) -> None:
        try:
            target(*arguments)
        except (RuntimeError, OSError, HTTPException) as error:
            with self._lock:
                self._failures.append(str(error)[:200])

    def _prompts(self) -> list[LongPrompt]:
        draw_, options = random.Random(self._options.seed), self._options
        now, prompts = 5.0, []
        while now < options.seconds - LAST_PROMPT_S:
            length = draw_.randint(*options.prompt_tokens)
            prompts.append(LongPrompt(now, [draw_.randrange(3, 500) for _ in range(length)]))
            now += draw_.expovariate(options.prompts_per_minute / 60)
        return prompts

    def _decode(self, site: SiteProcess, number: int) -> None:
        draw_ = random.Random(number)
        while time.time() < self._ends_at:
            prompt = [draw_.randrange(3, 500) for _ in range(16)]
            body = {"model": "m", "prompt": prompt, "max_tokens": 256, "ignore_eos": True, "temperature": 0}
            times = []
            for at in site.stream(body):
                times.append(at)
                if at >= self._ends_at:
                    break
            with self._lock:
                self._gaps_ms += [1e3 * (after - before) for before, after in pairwise(times)]
                self._output_tokens += sum(at < self._ends_at for at in times)

    def _prefill(self, site: SiteProcess, began: float, prompt: LongPrompt) -> None:
        time.sleep(max(0.0, began + prompt.at_s - time.time()))
        sent = time.time()
        body = {"model": "m", "prompt": prompt.token_ids, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        first = next(iter(site.stream(body)))
        with self._lock:
            self._ttft_ms.append(1e3 * (first - sent))
            if first < self._ends_at:
                self._prompt_tokens += len(prompt.token_ids)


def _handed_over(site: SiteProcess) -> float:
    start = 'pilotlight_prompts_placed_total{model_name="m",where="handed_over"}'
    return sum(float(line.rpartition(" ")[2]) for line in site.text("/metrics").splitlines() if line.startswith(start))


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table("way", "ITL p50", "p90", "p99 ms", "TTFT p50 s", "tokens/s", "of them answers'", "failures")
    for name, found in results["ways"].items():
        itl, ttft = found["itl_ms"], found["ttft_ms"]
        table.add_row(
            name, f"{itl['p50']:.0f}", f"{found['itl_p90_ms']:.0f}", f"{itl['p99']:.0f}",
            f"{ttft['p50'] / 1e3:.1f}" if ttft else "-", f"{found['tokens_per_s']:.0f}",
            f"{found['output_tokens_per_s']:.0f}", str(len(found["failures"])),
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
