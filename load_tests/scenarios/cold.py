"""Cold starts: five times from a client's request to the first token of an unused model.

    (a) nothing runs, the checkpoint is not in the page cache      (b) nothing runs, its files are cached
    (c) the site is up, the model sleeps in host memory            (d) the device is full, so another model is put to sleep first
    (e) the engine host is killed under a stream; time to its next token, with a standby host and without

python -m load_tests.scenarios.cold --sizes ember,0.6b,3b --plot cold.svg. `docs/cold-start.md` explains the picture.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from load_tests import page_cache, random_checkpoint
from load_tests.peers import checkpoint as peers_checkpoint
from load_tests.records import spread, write_record
from load_tests.scenarios.cold_peers import GGUF, measure_peers
from load_tests.site_process import SiteProcess, kill
from load_tests.timeline import Bar, Row, svg

GIB = 1 << 30
PROMPT = list(range(3, 19))
CLOCKS = {
    "a": "nothing runs, files cold",
    "b": "nothing runs, files cached",
    "c": "asleep in host memory",
    "d": "swap: another model is put to sleep first",
    "e": "engine host killed",
    "e0": "the same without a standby",
}
_STAY_S = 0.5  # margin after a model's minimum stay of three wake times, before which it may not sleep (runtime/models/residency.py)
_PLACE_FOR_COPY = 1 << 30


class Measured(NamedTuple):
    ms: float
    bars: tuple[Bar, ...]


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m load_tests.scenarios.cold", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", default="ember,0.6b,3b", help="names (ember, 50m, 0.6b, 3b), checkpoint directories or GGUF files"
    )
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--clocks", default=",".join(CLOCKS))
    parser.add_argument("--threads", type=at_least_one, help="threads of the engine; torch's default if unset")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", type=Path, default=Path(".cold"), help="folder for generated checkpoints")
    parser.add_argument("--peers", type=Path, help="the folder that `make peers` filled, to measure their starts too")
    parser.add_argument("--peer-flags", default="", help="of llama-server")
    parser.add_argument("--plot", type=Path, help="an SVG with every clock's timeline")
    options = parser.parse_args(arguments)
    clocks = options.clocks.split(",")
    if unknown := set(clocks) - set(CLOCKS):
        parser.error(f"there is no clock {', '.join(sorted(unknown))}; there are {', '.join(CLOCKS)}")
    console = Console()
    results: dict[str, Any] = {
        "rounds": options.rounds,
        "threads": options.threads,
        "device": options.device,
        "sizes": {},
    }
    rows: list[Row] = []
    for size in options.sizes.split(","):
        directory = directory_of(size, options.folder.absolute())
        with console.status(size):
            measured, facts = measure(size, directory, clocks, options, console)
        facts["peers"] = (
            measure_peers(options.peers, directory, options.threads, options.rounds, options.peer_flags.split())
            if options.peers
            else {}
        )
        results["sizes"][size] = facts | {"clocks": {clock: described(of_it) for clock, of_it in measured.items()}}
        rows += [row_of(size, clock, of_it) for clock, of_it in measured.items()]
    show(console, results)
    if options.plot is not None:
        options.plot.write_text(svg("From the request to the first token", rows))
        console.print(f"Picture: {options.plot}", soft_wrap=True)
    console.print(f"Record: {write_record('cold-start', results)}", soft_wrap=True)
    return 0


def directory_of(size: str, folder: Path) -> Path:
    if size == "ember":
        return random_checkpoint.EMBER
    if size in random_checkpoint.SHAPES:
        return random_checkpoint.write(folder / size, random_checkpoint.SHAPES[size])
    if size == "0.6b":
        directory = folder / size
        if not (directory / "model.safetensors").exists():
            peers_checkpoint.write_safetensors(directory)
            random_checkpoint.add_tokenizer(directory)
        return directory
    if Path(size).is_dir() or Path(size).suffix == GGUF:
        return Path(size).absolute()
    raise SystemExit(f"there is no size {size!r}: ember, 50m, 0.6b, 3b, a checkpoint's directory or a GGUF file")


def weight_files(checkpoint: Path) -> list[Path]:
    return [checkpoint] if checkpoint.suffix == GGUF else sorted(checkpoint.glob("*.safetensors"))


def measure(
    size: str, directory: Path, clocks: list[str], options: argparse.Namespace, console: Console
) -> tuple[dict[str, list[Measured]], dict[str, Any]]:
    files = weight_files(directory)
    facts: dict[str, Any] = {"file_bytes": sum(file.stat().st_size for file in files)}
    bench = Bench(directory, options)
    measured: dict[str, list[Measured]] = {}
    for clock in clocks:
        console.log(f"{size}: ({clock}) {CLOCKS[clock]}")
        if clock in ("a", "b"):
            shares = []
            for _ in range(options.rounds):
                page_cache.warm(files)
                if clock == "a":
                    shares.append(page_cache.drop(files))
                measured.setdefault(clock, []).append(bench.from_nothing())
            if shares:
                # If the share is above 0, the kernel kept some pages, and (a) is not cold.
                facts["still_cached_share"] = round(max(shares), 4)
                if max(shares) > 0.01:
                    console.log(
                        f"the kernel kept {max(shares):.0%} of the checkpoint is still in the page cache: (a) is not cold"
                    )
        else:
            measured[clock] = {"c": bench.asleep, "d": bench.swap, "e": bench.crash, "e0": bench.crash_alone}[clock]()
    facts |= {"weights_bytes": bench.weights_bytes, "copy_ms": round(copy_ms(bench.weights_bytes), 2)}
    return measured, facts


class Bench:
    """The five measurements of one checkpoint."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self._source = str(directory)
        self._is_mapped = directory.suffix == GGUF
        self._rounds: int = options.rounds
        self._engine = {"device": options.device, "threads": options.threads, "kv_gib": 0.25, "standby": False}
        self.weights_bytes = sum(file.stat().st_size for file in weight_files(directory))

    def from_nothing(self) -> Measured:
        with self._site(self._model("a", "auto")) as site:
            site.ask(one_token("a"))
            ended_s = time.time()
            return self._measured(site, site.began_s, ended_s)

    def asleep(self) -> list[Measured]:
        with self._site(self._model("a", "auto", sleep_after_s=0.2)) as site:
            site.ask(one_token("a"))
            self._learn_size(site)
            return [self._wake(site) for _ in range(self._rounds)]

    def _wake(self, site: SiteProcess) -> Measured:
        # At the first sleep, the weights are still being copied to host memory. A GGUF file is mapped: its pages are not copied.
        asleep = "disk" if self._is_mapped else "host"
        site.until(lambda: site.residency("a") == asleep, "the model sleeps in host memory")
        return self._asked(site, "a")

    def swap(self) -> list[Measured]:
        """Measure two models that take turns on a device with memory for one and a half."""
        room = {"weights_gib": 1.5 * self._awake_bytes() / GIB}
        with self._site(self._model("a", "auto"), self._model("b", "auto"), **room) as site:
            for model in ("a", "b"):
                site.ask(one_token(model))
                self._until_kept(site, model)
            found = []
            for i in range(self._rounds):
                wake_s = max(entry["wake_ms"] for entry in site.get("/status")["models"]) / 1e3
                time.sleep(3 * wake_s + _STAY_S)  # a swap does not include the minimum stay
                found.append(self._asked(site, "ab"[i % 2]))
            return found

    def crash(self) -> list[Measured]:
        with self._site(self._model("a", "device"), standby=True, standby_after_s=0.0) as site:
            return [self._crash(site, with_standby=True) for _ in range(self._rounds)]

    def crash_alone(self) -> list[Measured]:
        with self._site(self._model("a", "device")) as site:
            return [self._crash(site, with_standby=False) for _ in range(self._rounds)]

    def _crash(self, site: SiteProcess, *, with_standby: bool) -> Measured:
        site.until(lambda: site.get("/readyz")["status"] == "ready", "the site is ready")
        self._until_kept(site, "a")
        if with_standby:
            site.until(lambda: site.pid("standby") is not None, "a standby is ready")
        events = site.stream(endless("a"))
        for _ in range(5):
            next(events)
        pid = site.pid("engine")
        assert pid is not None
        killed_s = kill(pid)
        ended_s = next(at for at in events if at > killed_s + 0.005)  # earlier events were already sent before the kill
        measured = self._measured(site, killed_s, ended_s)
        events.close()  # type: ignore[attr-defined]
        return measured

    def _until_kept(self, site: SiteProcess, model: str) -> None:
        """Wait until host memory has a copy of the weights, as at a site that has been up for a while.

        They are copied after the first requests.
        """

        def is_kept() -> bool:
            models = site.get("/status")["models"]
            return self._is_mapped or any(each["name"] == model and each["in_host_memory"] for each in models)

        site.until(is_kept, "the model's weights are in host memory")

    def _asked(self, site: SiteProcess, model: str) -> Measured:
        began_s = time.time()
        site.ask(one_token(model))
        return self._measured(site, began_s, time.time())

    def _measured(self, site: SiteProcess, began_s: float, ended_s: float) -> Measured:
        """Return the phases that the site reports, with times on the client's clock.

        The remaining time after the last phase is the phase of the first token.
        """
        spans = [span for span in site.get("/timeline")["spans"] if began_s <= span["ended_s"] <= ended_s]
        bars = [
            Bar(span["name"], 1e3 * (max(span["began_s"], began_s) - began_s), 1e3 * (span["ended_s"] - began_s))
            for span in spans
        ]
        total_ms = 1e3 * (ended_s - began_s)
        last_ms = max((bar.ended_ms for bar in bars), default=0.0)
        return Measured(total_ms, (*bars, Bar("first token", last_ms, total_ms)))

    def _learn_size(self, site: SiteProcess) -> None:
        """Record the size of the weights in the engine, as opposed to their size on disk."""
        self.weights_bytes = max(self.weights_bytes, site.get("/status")["models"][0]["weights_bytes"])

    def _awake_bytes(self) -> int:
        with self._site(self._model("a", "auto")) as site:
            site.ask(one_token("a"))
            self._learn_size(site)
        return self.weights_bytes

    def _model(self, name: str, residency: str, **more: Any) -> dict[str, Any]:
        return {"name": name, "source": self._source, "residency": residency, **more}

    def _site(self, *models: dict[str, Any], **engine: Any) -> SiteProcess:
        return SiteProcess(f"bench-cold-{os.getpid()}", self._engine | engine, list(models))


def one_token(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True}


def endless(model: str) -> dict[str, Any]:
    """Return a request for an endless answer.

    With random weights most tokens have no text and cause no event, so the request has a bias towards one with text.
    """
    return {**one_token(model), "max_tokens": 2000, "logit_bias": {"300": 100}}


def copy_ms(num_bytes: int) -> float:
    """Time a copy of so many bytes within memory: the best of three, scaled up from a gigabyte."""
    size = min(num_bytes, _PLACE_FOR_COPY)
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return 1e3 * min(times) * num_bytes / size


def median_of(measured: list[Measured]) -> Measured:
    """Return the round with the median total, since the phases of one round belong together."""
    return sorted(measured)[(len(measured) - 1) // 2]


def described(measured: list[Measured]) -> dict[str, Any]:
    bars = [
        {key: round(value, 2) if key != "name" else value for key, value in bar._asdict().items()}
        for bar in median_of(measured).bars
    ]
    return {"ms": spread([each.ms for each in measured], 1), "timeline": bars}


def row_of(size: str, clock: str, measured: list[Measured]) -> Row:
    middle = median_of(measured)
    return Row(f"{size} ({clock}) {CLOCKS[clock]}", middle.ms, middle.bars)


def show(console: Console, results: dict[str, Any]) -> None:
    clocks = [clock for clock in CLOCKS if any(clock in size["clocks"] for size in results["sizes"].values())]
    table = Table("median ms to the first token", *results["sizes"], box=None, header_style="bold")
    for clock in clocks:
        cells = [
            f"{size['clocks'][clock]['ms']['median']:,.0f}" if clock in size["clocks"] else "-"
            for size in results["sizes"].values()
        ]
        table.add_row(f"({clock}) {CLOCKS[clock]}", *cells)
    peers = sorted({name for size in results["sizes"].values() for name in size["peers"]})
    for name in peers:
        told = [size["peers"].get(name, {}) for size in results["sizes"].values()]
        table.add_row(
            f"(b) {name}", *(f"{one['ms']['median']:,.0f}" if "ms" in one else one.get("absent", "-") for one in told)
        )
    table.add_row("one copy of the weights", *(f"{size['copy_ms']:,.1f}" for size in results["sizes"].values()))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
