"""The process of one site: `python -m pilotlight.runtime SITE_FILE`, or `run(site)` for commands.

SIGTERM or SIGINT drains: /readyz turns 503, new requests are refused, open streams may finish for drain_timeout_s and are then ended with an error
event. After that the server closes. SIGHUP reloads the site's file.
"""

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pilotlight.runtime.api.unread_body import UnreadBodyMiddleware
from pilotlight.runtime.app import SiteApp, build_app
from pilotlight.runtime.hosts.devices import check_devices
from pilotlight.runtime.models.checkpoint_children import close_children
from pilotlight.runtime.models.sources import SourceError, local_directory, name_of
from pilotlight.runtime.site import Site, access_of
from pilotlight.runtime.telemetry.timeline import process_began_s
from pilotlight.sites.config import ConfigError, check_secrets
from pilotlight.sites.reloading import read_again
from pilotlight.sites.rules import is_loopback
from pilotlight.sites.site import ModelConfig, SiteConfig, load_site
from pilotlight.support import background
from pilotlight.support.logs import start_logging
from pilotlight.support.service_manager import notify_ready, notify_status
from pilotlight.support.signals import follow_signals, release_signals
from pilotlight.wire.hop.headers import DEPLOY_TOKEN_ENV, HOP_SECRET_ENV, OVERLOADED
from pilotlight.wire.http.access_log import AccessLog
from pilotlight.wire.http.certificate import Certificate
from pilotlight.wire.http.connection import HttpLimits
from pilotlight.wire.http.listen import (
    GRACE_S,
    KEEP_ALIVE_S,
    ListenError,
    bind,
    file_limit,
    follow_parent,
    loop_factory,
    raise_file_limit,
    url_of,
)
from pilotlight.wire.http.middleware import OriginCheck, Origins
from pilotlight.wire.http.stock_servers import check_installed, make_server
from pilotlight.wire.paths import API_PATHS

log = logging.getLogger("pilotlight.site")

NO_TORCH = (
    "models need torch, which is not installed: `pip install 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/cpu` for a CPU, "
    "`pip install 'torch>=2.11,<2.14'` for a GPU, with the Python that runs pilotlight"
)
LAST_BYTES_S = 3.0  # time to send the last bytes of answers after the drain
MAX_HEAD_BYTES = 128 << 10  # more than a router sends: by default up to 64 KiB in 128 headers, and its own headers
MAX_HEADERS = 1024
# A connection is closed if its client reads nothing for this time. The client may be a router with a slow client itself: a kernel with a buffer
# of 4 MB reports progress only after a third of it is read, which takes two minutes at 10 kB/s.
STALL_S = 600.0


class ShutdownHooks(NamedTuple):
    """Callbacks of a shutdown, and the time for the last bytes."""

    on_drain: Callable[[int], None] = lambda num_open: None  # called with the number of open requests and sockets
    on_cut: Callable[[int], None] = lambda num_open: None  # called with the number of those that are cut off
    last_bytes_s: float = LAST_BYTES_S


class StartError(Exception):
    """A part of the site cannot be started; the message names the change to make."""


def serve_file(file: Path, model: str | None = None, deployments: str | None = None) -> int:
    """Serve the site of a file and return the exit code.

    `model` is the source of a model that replaces the models in the file. `deployments` is the URL of the router whose deployed functions are served,
    unless the file names one."""
    try:
        load = partial(load_changed, model, deployments)
        return run(load(file), file=file, load=load)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1


def load_changed(model: str | None, deployments: str | None, file: Path) -> SiteConfig:
    """Read a site from a file, with the `model` and `deployments` of `serve_file`. Raises ConfigError."""
    site = load_site(file)
    if model is not None:
        site = replace(site, models=(ModelConfig(name=name_of(model), source=model),))
    if deployments is not None and site.functions.deployments is None:
        site = replace(site, functions=replace(site.functions, deployments=deployments))
    return site


def run(
    site: SiteConfig,
    log_level: int | None = None,
    file: Path | None = None,
    load: Callable[[Path], SiteConfig] = load_site,
) -> int:
    """Serve a site until a stop signal; return the process's exit code.
    `log_level` overrides the site's level in this process. `file` is where the site was read; at SIGHUP `load` reads it again."""
    imported_at = time.time()
    start_logging(site.name, site.telemetry.log_level, site.telemetry.log_format)
    if log_level is not None:
        logging.getLogger().setLevel(log_level)
    try:
        if not follow_parent():
            return 1
        if HOP_SECRET_ENV not in os.environ and (secret := site.hop.secret()):
            os.environ[HOP_SECRET_ENV] = secret
        check_secrets(HOP_SECRET_ENV, DEPLOY_TOKEN_ENV)
        raise_file_limit()
        if site.models and find_spec("torch") is None:
            raise ConfigError(NO_TORCH)
        check_devices([device for group in site.engine.device_groups for device in group], site.engine.kv_gib or 0.0)
        for model in site.models:
            local_directory(model.source)
        check_installed(site.door.server_name)
        listener = bind(site.listen.host, site.listen.port)
        app = build_app(site, url=url_of(listener, is_tls=site.listen.tls_certificate is not None))
        app.site.timeline.note("site process", process_began_s() or imported_at, imported_at)
        app.site.timeline.note("site listens", imported_at)
    except (ListenError, ConfigError, SourceError) as error:
        print(f"site {site.name} cannot start: {error}", file=sys.stderr)
        return 1
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve_app(app, listener, on_ready=_settle_memory, file=file, load=load))
    except StartError as error:
        print(f"site {site.name} cannot start: {error}", file=sys.stderr)
        return 1
    finally:
        close_children()
    return 0


async def serve_app(
    app: SiteApp,
    listener: socket.socket,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[str], None] | None = None,
    hooks: ShutdownHooks = ShutdownHooks(),  # noqa: B008 - frozen
    file: Path | None = None,
    load: Callable[[Path], SiteConfig] = load_site,
) -> None:
    """Serve on a bound socket, and close it at the end. `app` must have been built for its URL.

    `stop` starts the drain. If it is None, signals are followed: the first stop signal starts the drain, the second one ends it at once, and at
    SIGHUP `load` reads `file` again. `on_ready` is called with the URL when the pinned models are loaded."""
    url = app.site.url or url_of(listener)
    log.info("listening on %s", url)
    force_shutdown = asyncio.Event()
    stopping = stop or _stop_on_signals(force_shutdown, app.site, lambda: reload(app.site, file, load))
    try:
        async with app.router.lifespan_context(app), _served(app, listener):
            notify_ready(f"listening on {url}; loading models")
            release_signals()
            announcing = asyncio.create_task(_announce(app.site, url, on_ready), name="announce")
            try:
                await stopping.wait()
                await drain(app.site, force_shutdown, hooks)
                await app.responses.sockets.end()
            finally:
                await background.stop(announcing)
    except (ConfigError, ListenError) as error:
        raise StartError(str(error)) from error
    finally:
        listener.close()
    log.info("stopped")


@asynccontextmanager
async def _served(app: SiteApp, listener: socket.socket) -> AsyncIterator[None]:
    """Open a scope in which clients are accepted; connections that came earlier wait for it."""
    site = app.site.config
    limits = _http_limits(int(site.functions.socket_message_mib * 2**20))
    origins = Origins(
        is_local=is_loopback(site.listen.host) and not site.door.open_to_all,
        hosts=site.door.hosts,
        cors_origins=site.door.cors_origins,
        own_cors=app.functions_path,
        api_paths=API_PATHS,
    )
    name = site.door.server_name
    judged = OriginCheck(app if name == "own" else UnreadBodyMiddleware(app), origins)
    outermost = AccessLog(judged) if site.telemetry.access_log else judged
    server = make_server(name, outermost, limits, overload_headers=OVERLOADED)
    listen = site.listen
    certificate = Certificate.of(listen.tls_certificate, listen.tls_key, http2=name == "hypercorn")
    await server.start(listener, certificate.context if certificate else None)
    try:
        if certificate is None:
            yield
        else:
            app.site.metrics.watch_certificate(lambda: certificate.ends_s)
            async with background.running(certificate.watch, "the watch over the certificate"):
                yield
    finally:
        await server.stop(GRACE_S)


def _http_limits(max_message_bytes: int) -> HttpLimits:
    """Return the limits of the HTTP server.

    They leave a quarter of the file descriptors to engines and functions."""
    files = file_limit()
    return HttpLimits(
        max_head_bytes=MAX_HEAD_BYTES,
        max_headers=MAX_HEADERS,
        keep_alive_s=KEEP_ALIVE_S,
        stall_s=STALL_S,
        max_message_bytes=max_message_bytes,
        max_connections=sys.maxsize if files is None else files * 3 // 4,
        max_connections_per_client=sys.maxsize,
    )


async def drain(site: Site, force_shutdown: asyncio.Event, hooks: ShutdownHooks) -> None:
    admission = site.admission
    site.drain()
    log.info("draining: %d requests in progress", admission.inflight)
    hooks.on_drain(admission.num_open)
    empty = asyncio.create_task(admission.wait_until_empty())
    forced = asyncio.create_task(force_shutdown.wait())
    try:
        await asyncio.wait(
            {empty, forced}, timeout=site.config.limits.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not empty.done():
            hooks.on_cut(admission.num_open)
            site.fleet.fail_open("the site is shutting down and has stopped waiting for this answer")
            await asyncio.wait({empty}, timeout=hooks.last_bytes_s)
    finally:
        await background.stop(empty, forced)


async def _announce(site: Site, url: str, on_ready: Callable[[str], None] | None) -> None:
    while site.why_not_ready():
        await asyncio.sleep(0.02)
    log.info("ready: %s", url)
    notify_status(f"ready: {url}")
    if on_ready is not None:
        on_ready(url)


def _settle_memory(_: str) -> None:
    """Exclude all present objects from garbage collections, which would delay requests by 20 to 40 ms."""
    gc.freeze()
    gc.set_threshold(700, 10, 50)


LIVE = ("accounts", "keys", "door.require_key")


def reload(site: Site, file: Path | None, load: Callable[[Path], SiteConfig] = load_site) -> None:
    """Apply the keys of the site's file that can change while it runs."""
    if file is None:
        log.warning("SIGHUP: this site has no file to read again")
    elif (found := read_again(site.config, file, load, LIVE)) is not None:
        site.access.update_from(access_of(found))


def _stop_on_signals(force_shutdown: asyncio.Event, site: Site, reload: Callable[[], None]) -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal() -> None:
        (force_shutdown if stop.is_set() else stop).set()

    follow_signals(on_signal, reload, site.config.limits.drain_timeout_s)
    return stop
