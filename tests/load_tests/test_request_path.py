"""The traced path of a request: the output of a traced process, the functions that belong to the request, and callbacks."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from load_tests.assigned_callbacks import assigned_callbacks
from load_tests.path_shape import PathShape
from load_tests.request_path import HOOK, Function, Process, RequestPath, Window, report, traced, typical

PROGRAM = """
    import asyncio, sys

    def before(): pass

    def answer():
        return [part() for _ in range(2)]

    def part(): pass

    async def request():
        answer()

    async def main():
        await asyncio.create_task(request())

    before()
    for line in sys.stdin:
        asyncio.run(main())
        print("done", flush=True)
"""


@pytest.mark.process
def test_a_process_writes_down_what_it_enters_between_the_signals(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(dedent(PROGRAM))
    folder = tmp_path / "trace"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(HOOK), "PILOTLIGHT_TRACE": str(folder)}
    command = [sys.executable, "-m", "program"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def work() -> None:
            stdin.write("go\n")
            stdin.flush()
            assert stdout.readline() == "done\n"

        work()
        windows = traced([process.pid], folder, work)
        stdin.close()
    names = ["main", "request", "answer", "part"]
    window = windows["program"]
    assert list(window.counts) == [Function("program.py", name) for name in names]
    assert window.counts[Function("program.py", "part")] == 2
    assert window.tasks == ["main (new)", "request (new)"]


def window(counts: dict[str, int], *tasks: str) -> Window:
    functions = {Function("a.py", name): count for name, count in counts.items()}
    return Window(functions, {function: float(index) for index, function in enumerate(functions)}, list(tasks))


def test_what_idle_processes_enter_as_often_is_not_the_requests() -> None:
    asked = window({"probe": 1, "answer": 1, "write": 9}, "watch", "answer (new)")
    still = window({"probe": 1, "write": 1}, "watch")
    path = typical("site", [({"site": asked}, {"site": still})] * 3)
    assert path == Process("site", [Function("a.py", "answer"), Function("a.py", "write")], ["answer (new)"], 1.0)


def test_what_happens_beside_few_requests_is_not_theirs() -> None:
    rounds = [({"site": window({"answer": 1})}, {"site": window({})})] * 3
    rounds[1] = ({"site": window({"reload": 5, "answer": 1}, "reload (new)")}, {})
    assert typical("site", rounds)[:3] == ("site", [Function("a.py", "answer")], [])


def test_a_probe_answered_ahead_of_one_request_changes_no_order() -> None:
    receive, send = Function("a.py", "receive"), Function("a.py", "send")
    took_s = [1.0, 2.0, 3.0, 4.0, 5.0]  # the median times would be 2.1 for send and 3.0 for receive
    rounds: list[Any] = [
        ({"site": Window({receive: 1, send: 9}, {receive: at, send: at + 0.1}, [])}, {}) for at in took_s
    ]
    rounds[2] = ({"site": Window({send: 9, receive: 1}, {send: 0.5, receive: 3.0}, [])}, {})
    assert typical("site", rounds).functions == [receive, send]


def test_callbacks_that_are_assigned_after_construction_are_found(tmp_path: Path) -> None:
    source = """
        from collections.abc import Callable
        from functools import partial
        Callback = Callable[[], None]
        def free() -> None: ...
        class Link:
            on_head: Callback | None = None
            def __init__(self, on_end: Callback) -> None:
                self.on_end = on_end
                self.on_data: Callable[[bytes], None] | None = None
                self.name = ""
            def listen(self, told: Callback) -> None:
                self.on_head = told
                self.name = "name"
        class User:
            def __init__(self, link: Link) -> None:
                self.sink = lambda data: None
                link.on_data, link.name = self.sink, "other"
            def quiet(self, link: Link) -> None:
                link.on_data = None
                link.gone = partial(free)
                link.here = free
    """
    (tmp_path / "link.py").write_text(dedent(source))
    found = [(one.target, one.function) for one in assigned_callbacks(tmp_path, ["link.py"])]
    assert found == [
        ("self.on_head", "Link.listen"),
        ("link.on_data", "User.__init__"),
        ("link.gone", "User.quiet"),
        ("link.here", "User.quiet"),
    ]


def test_the_report_counts_a_function_of_two_processes_once() -> None:
    shared, own = Function("wire/sse.py", "feed"), Function("runtime/app.py", "answer")
    processes = [Process("edge", [shared], []), Process("runtime", [shared, own], ["answer"])]
    shape = PathShape(30, 100, ["wire/sse.py"], 1, 2, 15)
    path = RequestPath("abc", processes, [], [], shape, {"edge": 12.5})
    assert path.packages() == {"runtime": (1, 1), "wire": (1, 1)}
    lines = report(path)
    assert "  sum                  2          2" in lines
    assert "lines run / lines of the files opened for them: 30 / 100 = 30%" in lines
    assert "ARCHITECTURE's walk: 1 files, 2 steps, which hold 50% of the lines run" in lines
    assert "functions entered per token: edge 12.5" in lines
    assert path.record()["density"] == 0.3
