"""A tracer of our own functions, in processes that have this folder in PYTHONPATH.

PILOTLIGHT_TRACE must be set. It is not a part of the product and imports nothing of it, so that it traces any commit's checkout (the working
directory). Until the signal comes it costs the main thread nothing; other threads call a hook that returns at once. Each process announces itself in
the folder that PILOTLIGHT_TRACE names (`PID.process`), reports when it starts to record (`PID.on`), and at the second signal writes its results
(`PID.json`).
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SWITCH = signal.SIGRTMIN + 5
NO_FUNCTIONS = {"<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # code without a function's name
NOT_OURS = (".", "load_tests/", "tests/")  # folders outside the product, such as a virtual environment


class Tracer:
    """A recorder of functions and asyncio tasks in order of first entry, between two signals."""

    def __init__(self, folder: Path, root: str) -> None:
        self._folder, self._root = folder, root
        self._is_on = False
        self._functions: dict[CodeType, int] = {}  # how often each was called or resumed
        self._first_s: dict[CodeType, float] = {}
        self._tasks: dict[Any, None] = {}
        self._older_tasks: set[Any] = set()

    def on_event(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if not self._is_on or event != "call" or not code.co_filename.startswith(self._root):
            return
        self._first_s.setdefault(code, time.monotonic())
        self._functions[code] = self._functions.get(code, 0) + 1
        asyncio = sys.modules.get("asyncio")
        loop = asyncio and asyncio._get_running_loop()
        task = loop and asyncio and asyncio.current_task(loop)
        if task is not None:
            self._tasks.setdefault(task)

    def switch(self, number: int, frame: FrameType | None) -> None:
        if self._is_on:
            sys.setprofile(None)
            self._is_on = False
            self._write()
            return
        asyncio = sys.modules.get("asyncio")
        self._older_tasks = asyncio.all_tasks() if asyncio and asyncio._get_running_loop() else set()
        self._functions, self._first_s, self._tasks, self._is_on = {}, {}, {}, True
        (self._folder / f"{os.getpid()}.on").touch()
        sys.setprofile(self.on_event)

    def _write(self) -> None:
        seen = {
            "process": sys.orig_argv[1:3],
            "functions": [
                [file, code.co_qualname, count, self._first_s[code]]
                for code, count in self._functions.items()
                if code.co_name not in NO_FUNCTIONS
                and not (file := code.co_filename.removeprefix(self._root).removeprefix("pilotlight/")).startswith(
                    NOT_OURS
                )
            ],
            "tasks": [[task.get_coro().__qualname__, task not in self._older_tasks] for task in self._tasks],
        }
        part = self._folder / f"{os.getpid()}.part"
        part.write_text(json.dumps(seen))
        part.rename(self._folder / f"{os.getpid()}.json")


def install(folder: Path) -> None:
    tracer = Tracer(folder, os.getcwd() + os.sep)
    threading.setprofile(tracer.on_event)
    signal.signal(SWITCH, tracer.switch)
    (folder / f"{os.getpid()}.process").write_text(" ".join(sys.orig_argv))


if "PILOTLIGHT_TRACE" in os.environ and "-m" in sys.orig_argv:
    install(Path(os.environ["PILOTLIGHT_TRACE"]))
