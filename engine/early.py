"""`python -m engine.early`: an engine host that is started before its site has imported itself, or read its own file.

It hears twice on standard input: a line with what the site's file says of threads and of the first model, and the command line of engine/host.py once
the site knows it. Meanwhile it imports; then it looks at that model's weights, if imports are still under way. Ends when whoever was to speak has
ended, or does not want this host. Refuses to know what a site is.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from kernels import postponed


def main() -> None:
    likely = json.loads(_line())
    set_threads(likely)
    from engine import host
    from engine.preparation import import_early, take_process

    take_process()
    threading.Thread(target=import_early, name="imports", daemon=True).start()
    words = json.loads(_line())
    # The site has been imported, and leaves a core. Sooner the look would take from both imports what it needs, and a site is ready 50 ms later.
    look_ahead(likely)
    host.main(words)


def set_threads(likely: dict[str, Any]) -> None:
    """Before torch is imported, which counts them then. `likely`: {"threads": of the engine, "device": its own, "model": directory of the first one,
    "dtype": its type}, as far as they are known."""
    threads = likely.get("threads")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)


def look_ahead(likely: dict[str, Any]) -> None:
    model, device = likely.get("model"), likely.get("device", "auto")
    if model is not None and (device == "cpu" or (device == "auto" and not postponed.build().has_gpus)):
        from engine.weights import ahead

        ahead.begin(Path(model), likely.get("dtype", "auto"))


def _line() -> str:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # not through the interpreter's end: other threads may be inside torch
    return line


if __name__ == "__main__":
    main()
