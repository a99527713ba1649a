"""`python -m load_tests.request_path`: trace the functions that one warm chat request enters.

`pilotlight up` starts a router, a site and its engine host; the third streamed request of a connection is traced in every process
(load_tests/tracing). This is repeated on several connections; after each, idle processes are traced for as long. The path consists of the functions
that the median request entered, and more often than idle processes do, so that probes and other periodic work are left out. `--before FOLDER` also
traces a checkout of an older commit.
"""

import argparse
import http.client
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from load_tests.assigned_callbacks import Assignment, assigned_callbacks
from load_tests.local_network import ROOT, LocalNetwork
from load_tests.path_shape import PathShape, shape_of
from load_tests.records import write_record
from load_tests.tracing.sitecustomize import SWITCH

HOOK = Path(__file__).parent / "tracing"
ROUNDS = 7
TOKENS = (8, 72)  # lengths of two answers: their costs differ by the additional tokens
RARE_PROBES = "\n[health]\ninterval_s = 60.0\n"  # a probe in most traces would count as part of the request
NO_STANDBY = "standby = false"  # a standby has no part in a request, and uses a core for two seconds
WARM_UP_LIMIT_S, QUIET_CPU_S = 120.0, 0.1  # a second is quiet if all processes together use less CPU time in it
SETTLE_S = 0.05  # tracing continues for so long after the last byte, for the cleanup of a request
BODY = {
    "model": "ember",
    "stream": True,
    "messages": [{"role": "user", "content": "What is the airport code of Lisbon?"}],
}


class Function(NamedTuple):
    file: str
    name: str


class Process(NamedTuple):
    """The functions that the request entered in one process, in order, and the tasks it ran in."""

    module: str  # as in `python -m MODULE`
    functions: list[Function]
    tasks: list[str]  # asyncio tasks that our code ran in; "new" if the request started them
    began_s: float = 0.0  # seconds after sending the request until the first function that no idle process enters

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(function.file for function in self.functions))


class RequestPath(NamedTuple):
    commit: str
    processes: list[Process]
    callbacks: list[Assignment]  # assignments in the files of the path
    callbacks_on_path: list[Assignment]  # assignments by functions of the path, while the request runs
    shape: PathShape
    per_token: dict[str, float]  # functions entered for one more token of an answer, by process

    def packages(self) -> dict[str, tuple[int, int]]:
        """Count files and functions by package, of all processes together."""
        functions = {function for process in self.processes for function in process.functions}
        files = Counter(_package(file) for file in {function.file for function in functions})
        counts = Counter(_package(function.file) for function in functions)
        return {package: (files[package], counts[package]) for package in sorted(files)}

    def record(self) -> dict[str, Any]:
        packages = self.packages()
        return {
            "commit": self.commit,
            "files": sum(files for files, _ in packages.values()),
            "functions": sum(functions for _, functions in packages.values()),
            "packages": {name: {"files": files, "functions": count} for name, (files, count) in packages.items()},
            "processes": [
                {
                    "module": process.module,
                    "files": {file: [name for at, name in process.functions if at == file] for file in process.files},
                    "tasks": process.tasks,
                }
                for process in self.processes
            ],
            **self.shape.record(),
            "functions_per_token": self.per_token,
            "callbacks": [_line(found) for found in self.callbacks],
            "callbacks_on_path": [_line(found) for found in self.callbacks_on_path],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout of an older commit, traced first")
    parser.add_argument("--no-record", action="store_true")
    arguments = parser.parse_args()
    trees = [arguments.before, ROOT] if arguments.before else [ROOT]
    paths = [trace_request(tree.resolve()) for tree in trees]
    for path in paths:
        print("\n".join(report(path)))
    if not arguments.no_record:
        print(f"record: {write_record('request-path', {'trees': [path.record() for path in paths]}, packages=())}")


def trace_request(tree: Path, rounds: int = ROUNDS) -> RequestPath:
    """Trace one request through the product in `tree`."""
    with tempfile.TemporaryDirectory(prefix="pilotlight-trace-") as name:
        folder = Path(name)
        environment = {"PYTHONPATH": str(HOOK), "PILOTLIGHT_TRACE": name}
        with LocalNetwork(
            environment=environment, tree=tree, num_sites=1, network_settings=RARE_PROBES, engine_settings=NO_STANDBY
        ) as network:
            _warm_up(network.url, folder)
            seen = [_round(network.url, folder) for _ in range(rounds)]
            per_token = _per_token(network.url, folder)
    processes = [process for module in seen[0][0] if (process := typical(module, seen)).functions]
    processes.sort(key=lambda process: process.began_s)
    files = sorted({file for process in processes for file in process.files})
    callbacks = assigned_callbacks(tree, files)
    entered = {function for process in processes for function in process.functions}
    on_path = [found for found in callbacks if Function(found.file, found.function) in entered]
    shape = shape_of(tree, [(function.file, function.name) for function in entered])
    return RequestPath(_commit(tree), processes, callbacks, on_path, shape, per_token)


class Window(NamedTuple):
    """One traced interval of a process."""

    counts: dict[Function, int]  # how often each was entered, in order of first entry
    first_s: dict[Function, float]  # seconds from the start of tracing to the first entry
    tasks: list[str]


def typical(module: str, rounds: list[tuple[dict[str, Window], dict[str, Window]]]) -> Process:
    """Keep the functions that the median request entered more often than an idle process, in order."""
    empty = Window({}, {}, [])
    asked = [traced.get(module, empty) for traced, _ in rounds]
    idle = [still.get(module, empty) for _, still in rounds]
    functions = dict.fromkeys(function for one in asked for function in one.counts)
    tasks = dict.fromkeys(task for one in asked for task in _numbered(one.tasks))

    def median(windows: list[Window], function: Function) -> float:
        return statistics.median(one.counts.get(function, 0) for one in windows)

    def first_s(function: Function) -> float:
        return statistics.median(one.first_s[function] for one in asked if function in one.first_s)

    entered = [function for function in functions if median(asked, function) > median(idle, function)]
    orders = [[function for function in one.counts if function in entered] for one in asked]
    entered.sort(key=lambda function: statistics.median(one.index(function) for one in orders if function in one))
    own = [function for function in entered if not any(function in one.counts for one in idle)]

    def num_with(windows: list[Window], task: tuple[str, int]) -> int:
        return sum(task in _numbered(one.tasks) for one in windows)

    return Process(
        module,
        entered,
        [
            task[0]
            for task in tasks
            if 2 * num_with(asked, task) > len(rounds) and num_with(asked, task) > num_with(idle, task)
        ],
        first_s(own[0]) if own else math.inf,
    )


def _numbered(names: list[str]) -> list[tuple[str, int]]:
    """Return each name with the number of equal names before it, so that all are distinct."""
    return [(name, names[:index].count(name)) for index, name in enumerate(names)]


def _round(url: str, folder: Path) -> tuple[dict[str, Window], dict[str, Window]]:
    """Trace a connection's third request, then idle processes for as long; return both by module."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    pids = _processes(folder)
    try:
        for _ in range(2):
            _ask(connection)
        time.sleep(SETTLE_S)
        began_s = time.monotonic()
        asked = traced(pids, folder, lambda: _ask(connection))
        lasted_s = time.monotonic() - began_s
    finally:
        connection.close()
    time.sleep(SETTLE_S)
    return asked, traced(pids, folder, lambda: time.sleep(lasted_s))


def _per_token(url: str, folder: Path) -> dict[str, float]:
    """Return how many functions each process enters for one more token.

    That is the median difference between two answers, divided by the difference of their lengths.
    """
    few, many = TOKENS
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    pids = _processes(folder)
    found: dict[str, list[float]] = {}
    try:
        for _ in range(3):
            short, long = (traced(pids, folder, partial(_ask, connection, num)) for num in TOKENS)
            for module in short.keys() & long.keys():
                more = sum(long[module].counts.values()) - sum(short[module].counts.values())
                found.setdefault(module, []).append(more / (many - few))
    finally:
        connection.close()
    return {module: round(statistics.median(counts), 1) for module, counts in found.items()}


def _warm_up(url: str, folder: Path) -> None:
    """Send requests until one-time work is done.

    The first answers may be computed before the model is loaded.
    """
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    deadline = time.monotonic() + WARM_UP_LIMIT_S
    num_quiet = 0
    while num_quiet < 4 and time.monotonic() < deadline:
        _ask(connection)
        used_s = _cpu_s(folder)
        time.sleep(1.0)
        num_quiet = num_quiet + 1 if _cpu_s(folder) - used_s < QUIET_CPU_S else 0
    connection.close()


def _cpu_s(folder: Path) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in _processes(folder))


def _processes(folder: Path) -> list[int]:
    """Return the ids of live processes, without a standby, which takes no part in requests."""
    return [
        int(path.stem)
        for path in folder.glob("*.process")
        if Path(f"/proc/{path.stem}").exists() and "--standby" not in path.read_text()
    ]


def traced(pids: list[int], folder: Path, work: Callable[[], None]) -> dict[str, Window]:
    _switch(pids, folder, "on")
    began_s = time.monotonic()
    work()
    time.sleep(SETTLE_S)
    _switch(pids, folder, "json")
    found = [json.loads((folder / f"{pid}.json").read_text()) for pid in pids]
    for path in [*folder.glob("*.on"), *folder.glob("*.json")]:
        path.unlink()
    windows: dict[str, Window] = {}
    for one in found:
        counts: Counter[Function] = Counter()
        first_s: dict[Function, float] = {}
        for file, name, count, at_s in one["functions"]:
            counts[Function(file, name)] += count
            first_s.setdefault(Function(file, name), at_s - began_s)
        tasks = [f"{name} (new)" if is_new else name for name, is_new in one["tasks"]]
        if counts:
            windows.setdefault(one["process"][1].removeprefix("pilotlight."), Window(counts, first_s, tasks))
    return windows


def _ask(connection: http.client.HTTPConnection, num_tokens: int | None = None) -> None:
    """Request an answer that ends by itself, or has `num_tokens` tokens."""
    body = BODY if num_tokens is None else BODY | {"max_tokens": num_tokens, "ignore_eos": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200 or not text.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"the request was not answered: {answer.status} {text[:500]!r}")


def _switch(pids: list[int], folder: Path, suffix: str) -> None:
    """Signal every process, and wait until each has answered with a file."""
    for pid in pids:
        os.kill(pid, SWITCH)
    deadline = time.monotonic() + 30.0
    while waiting := [pid for pid in pids if not (folder / f"{pid}.{suffix}").exists()]:
        if time.monotonic() > deadline:
            names = [(folder / f"{pid}.process").read_text() for pid in waiting]
            raise RuntimeError(f"processes that do not answer the tracer's signal: {names}")
        time.sleep(0.005)


def report(path: RequestPath) -> list[str]:
    packages = path.packages()
    lines = [f"Commit {path.commit}: one warm streamed chat request", "", "package            files  functions"]
    lines += [f"  {name:<16} {files:>5} {functions:>10}" for name, (files, functions) in packages.items()]
    files, functions = (sum(column) for column in zip(*packages.values(), strict=True))
    lines += [f"  {'sum':<16} {files:>5} {functions:>10}", ""]
    for process in path.processes:
        lines += [f"python -m {process.module}: {len(process.files)} files, {len(process.functions)} functions"]
        lines += [f"  tasks: {len(process.tasks)}{''.join(f'; {name}' for name in process.tasks)}"]
        for file in process.files:
            names = [name for at, name in process.functions if at == file]
            lines += [f"  {file} {len(names)}: {', '.join(names)}"]
        lines += [""]
    shape = path.shape
    lines += [
        f"lines run / lines of the files opened for them: {shape.lines_run} / {shape.lines_opened} = {shape.density:.0%}"
    ]
    lines += [f"files entered for three functions or fewer: {len(shape.files_for_few)}"]
    lines += [
        f"ARCHITECTURE's walk: {shape.walk_files} files, {shape.walk_steps} steps, which hold {shape.walk_share:.0%} of the lines run"
    ]
    lines += [
        f"functions entered per token: {', '.join(f'{name} {count:g}' for name, count in path.per_token.items())}",
        "",
    ]
    lines += [f"callbacks assigned after construction: {len(path.callbacks_on_path)} while the request runs"]
    lines += [f"  {_line(found)}" for found in path.callbacks_on_path]
    others = [found for found in path.callbacks if found not in path.callbacks_on_path]
    lines += [f"and {len(others)} more in files of the path, when processes start or something fails"]
    return [*lines, *(f"  {_line(found)}" for found in others), ""]


def _line(found: Assignment) -> str:
    return f"{found.file}:{found.line} {found.target} in {found.function}"


def _package(file: str) -> str:
    return file.partition("/")[0]


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--abbrev=12", "--dirty=+"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
