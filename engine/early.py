"""`python -m engine.early`: an engine host that is started before its site has imported itself, or read its own file.

It hears twice on standard input: a line with what the site's file says of threads and of the first model, and the command line of engine/host.py once
the site knows it. Meanwhile it makes that model's opening program ready, if an earlier life has left one; else it imports torch. Ends when whoever
was to speak has ended, or does not want this host. Refuses to know what a site is.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels.torch_build import has_gpus

if TYPE_CHECKING:
    from engine.opening.opener import Opener


def main() -> None:
    likely = json.loads(_line())
    set_threads(likely)
    from engine import host, socket_transport  # noqa: F401 - which the host asks for when its site waits for it
    from engine.preparation import import_early, take_process

    take_process()
    opener = find_opener(likely)
    if opener is None:
        threading.Thread(target=import_early, name="imports", daemon=True).start()
    host.main(json.loads(_line()), opener)


def set_threads(likely: dict[str, Any]) -> None:
    """Before torch is imported, which counts them then. `likely`: {"threads": of the engine, "device": its own, "model": directory of the first one,
    "dtype": its type}, as far as they are known."""
    threads = likely.get("threads")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def find_opener(likely: dict[str, Any]) -> "Opener | None":
    from engine.opening.opener import Opener

    model = likely.get("model")
    if model is None or not _is_on_cpu(likely):
        return None
    return Opener.find(Path(model), likely.get("dtype", "auto"), likely.get("threads"))


def _is_on_cpu(likely: dict[str, Any]) -> bool:
    device = likely.get("device", "auto")
    return device == "cpu" or (device == "auto" and not has_gpus())


def _line() -> str:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # not through the interpreter's end: other threads may be inside torch
    return line


if __name__ == "__main__":
    main()
