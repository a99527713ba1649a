"""`pilotlight serve`: one site with one model and no router, for people who come from other engines."""

import logging
import os
import signal
import threading
import time

from rich.console import Console

from runtime.cli.errors import CliError
from runtime.cli.start_progress import Starting, StartProgress
from runtime.cli.up import POLL_S, require_free
from sites.config import parse
from sites.site import SiteConfig


def serve(
    model: str, host: str, port: int, name: str | None, dtype: str, device: str, threads: int | None, kv_gib: float
) -> int:
    """Runs until it is told to stop; returns the exit status."""
    from runtime.engines.sources import SourceError, local_directory
    from runtime.serve import run

    site = site_of(model, host, port, name, dtype, device, threads, kv_gib)
    try:
        local_directory(model)
    except SourceError as error:
        raise CliError(str(error)) from None
    require_free(host, port)
    start = Start(site)
    threading.Thread(target=start.show, daemon=True).start()
    status = run(site, log_level=logging.CRITICAL)  # the screen belongs to the progress; refusals reach the clients
    if start.failure is not None:
        raise CliError(start.failure)
    return status


def site_of(
    model: str, host: str, port: int, name: str | None, dtype: str, device: str, threads: int | None, kv_gib: float
) -> SiteConfig:
    """A site file's values, made of the command's options."""
    place = model.split("#")[0].removeprefix("embedded:").rstrip("/")
    served = name or place.rsplit("/", 1)[-1].removesuffix(".packed")
    engine = {"device": device, "kv_gib": kv_gib} | ({} if threads is None else {"threads": threads})
    values = {
        "name": "local",
        "place": {"city": "here", "latitude": 0.0, "longitude": 0.0},
        "listen": {"host": host, "port": port},
        "engine": engine,
        "models": [{"name": served, "source": model, "dtype": dtype}],
    }
    return parse(SiteConfig, values, "pilotlight serve")


class Start:
    """Watches the server from a thread of its own until it is ready, or ends it when it cannot become so."""

    def __init__(self, site: SiteConfig) -> None:
        self.failure: str | None = None
        self._model = site.models[0]
        self._url = f"http://{site.listen.host}:{site.listen.port}"
        self._server = Starting(site.name, self._url, publishes_status=True)

    def show(self) -> None:
        console = Console()
        console.print(
            f"Serving {self._model.source} as {self._model.name}.", highlight=False, markup=False, soft_wrap=True
        )
        progress = StartProgress(console, [self._server])
        with progress.shown():
            while not progress.poll():
                if self._server.failure is not None:
                    self.failure = self._server.failure
                    os.kill(os.getpid(), signal.SIGTERM)  # the server in the main thread ends in order
                    return
                time.sleep(POLL_S)
        console.print(f"Ready: {self._url}/v1/chat/completions", highlight=False, markup=False)
