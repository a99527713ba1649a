"""`pilotlight serve`: one site with one model and no router, for people who come from other engines."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from rich.console import Console

from runtime.cli.errors import CliError
from runtime.cli.start_progress import Starting, StartProgress
from runtime.cli.up import POLL_S, require_free
from sites.config import SiteConfig, parse


def serve(
    model: str, host: str, port: int, name: str | None, dtype: str, device: str, threads: int | None, kv_gib: float
) -> int:
    """Runs until it is told to stop; returns the exit status."""
    from runtime.serve import run

    site = site_of(model, host, port, name, dtype, device, threads, kv_gib)
    require_free(host, port)
    threading.Thread(target=show_start, args=(site,), daemon=True).start()
    return run(site)


def site_of(
    model: str, host: str, port: int, name: str | None, dtype: str, device: str, threads: int | None, kv_gib: float
) -> SiteConfig:
    """A site file's values, made of the command's options."""
    if Path(model).exists() and not Path(model).is_dir():
        raise CliError(f"{model} is a file: name the checkpoint's directory (with config.json and *.safetensors).")
    served = name or model.removeprefix("embedded:").rstrip("/").rsplit("/", 1)[-1]
    engine = {"device": device, "kv_gib": kv_gib} | ({} if threads is None else {"threads": threads})
    values = {
        "name": "local",
        "place": {"city": "here", "latitude": 0.0, "longitude": 0.0},
        "listen": {"host": host, "port": port},
        "engine": engine,
        "models": [{"name": served, "source": model, "dtype": dtype}],
    }
    return parse(SiteConfig, values, "pilotlight serve")


def show_start(site: SiteConfig) -> None:
    console = Console()
    url = f"http://{site.listen.host}:{site.listen.port}"
    model = site.models[0]
    console.print(f"Serving {model.source} as {model.name}.", highlight=False, markup=False)
    server = Starting(site.name, url, publishes_status=True)
    progress = StartProgress(console, [server])
    with progress.shown():
        while not progress.poll():
            if server.failure is not None:
                print(f"pilotlight: {server.failure}", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGTERM)  # the server in the main thread drains and ends
                return
            time.sleep(POLL_S)
    console.print(f"Ready: {url}/v1/chat/completions", highlight=False, markup=False)
