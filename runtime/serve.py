"""Serves one site until it is told to stop: `serve_file` for `python -m runtime SITE_FILE`, and `run(site)` for the command line.

SIGTERM, SIGINT or SIGHUP drains: /readyz turns 503, new requests are refused, open streams may finish for drain_timeout_s and are then ended with an
error event; only then does the server close. Hypercorn's own grace (3 s, streams cut without a word) never has anything left to cut.
"""

import asyncio
import contextlib
import gc
import logging
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from hypercorn.asyncio import serve
from hypercorn.utils import LifespanFailureError
from starlette.applications import Starlette

from runtime.app import build_app
from runtime.engines.devices import check_devices
from runtime.engines.early_host import EarlyHost
from runtime.engines.sources import SourceError, local_directory
from runtime.timeline import process_began_s
from sites.config import ConfigError, SiteConfig, load_site
from wire.hypercorn_connection import install as install_connections
from wire.joined_head import install as install_joined_heads
from wire.server import ListenError, bind, follow_parent, hypercorn_config, loop_factory, raise_file_limit, url_of
from wire.signals import stop_signals
from wire.socket_stream import install as install_sockets

log = logging.getLogger("pilotlight.site")

GRACE_S = 3.0  # for answers whose last bytes are on their way when the drain ends


def serve_file(file: Path, early: EarlyHost | None = None) -> int:
    """As `run`."""
    try:
        return run(load_site(file), early=early)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1


def run(site: SiteConfig, log_level: int = logging.INFO, early: EarlyHost | None = None) -> int:
    """Returns the process's exit code. `early`: the first engine host's process, on its way already."""
    imported_at = time.time()
    logging.basicConfig(level=log_level, format=f"%(asctime)s {site.name} %(levelname)s %(message)s")
    try:
        if not follow_parent():
            return 1
        raise_file_limit()
        check_devices(site.engine.all_devices)
        for model in site.models:
            local_directory(model.source)
        listener = bind(site.listen.host, site.listen.port)
        app = build_app(site, early=early)
        app.state.timeline.note("site process", process_began_s() or imported_at, imported_at)
        app.state.timeline.note("site listens", imported_at)
    except (ListenError, ConfigError, SourceError) as error:
        print(f"site {site.name} cannot start: {error}", file=sys.stderr)
        return 1
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve_app(app, site, listener, on_ready=_settle_memory))
    except LifespanFailureError:
        if app.state.why_not_started is None:
            raise
        print(f"site {site.name} cannot start: {app.state.why_not_started}", file=sys.stderr)
        return 1
    return 0


async def serve_app(
    app: Starlette,
    site: SiteConfig,
    listener: socket.socket,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serves on a bound socket, which it takes over. `stop` begins the drain, as do the stop signals when none is given, of which a second one
    cuts it short; `on_ready` gets the URL once the site answers requests with its models loaded."""
    url = app.state.url = url_of(listener)
    log.info("listening on %s", url)
    hurry = asyncio.Event()
    stopping = stop or _stop_on_signals(hurry)
    announcing = asyncio.create_task(_announce(app, url, on_ready), name="announce")

    async def drained() -> None:
        await stopping.wait()
        await _drain(app, site.limits.drain_timeout_s, hurry)

    install_connections()
    install_sockets()
    install_joined_heads()
    config = hypercorn_config(listener)
    config.websocket_max_message_size = int(site.functions.socket_message_mib * 2**20)
    try:
        await serve(app, config, shutdown_trigger=drained)  # type: ignore[arg-type]
    finally:
        announcing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcing
    log.info("stopped")


async def _drain(app: Starlette, timeout_s: float, hurry: asyncio.Event) -> None:
    admission, fleet = app.state.admission, app.state.fleet
    admission.drain()
    fleet.end()
    log.info("draining: %d requests at work", admission.inflight)
    empty = asyncio.create_task(admission.wait_until_empty())
    hurried = asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait({empty, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not empty.done():
            fleet.fail_open("the site is shutting down and does not wait for this answer any longer")
            await asyncio.wait({empty}, timeout=GRACE_S)
    finally:
        empty.cancel()
        hurried.cancel()
        await asyncio.gather(empty, hurried, return_exceptions=True)


async def _announce(app: Starlette, url: str, on_ready: Callable[[str], None] | None) -> None:
    while app.state.health.why_not_ready():
        await asyncio.sleep(0.02)
    log.info("ready: %s", url)
    if on_ready is not None:
        on_ready(url)


def _settle_memory(_: str) -> None:
    """What is here now stays. A full collection that looks at it again holds every request up: for 20 to 40 ms, after some hundred failed ones."""
    gc.freeze()
    gc.set_threshold(700, 10, 50)


def _stop_on_signals(hurry: asyncio.Event) -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop
