"""Serves one site until it is told to stop: `python -m runtime.serve SITE_FILE`, and `run(site)` for the command line.

SIGTERM or SIGINT drains: /readyz turns 503, new requests are refused, open streams may finish for drain_timeout_s and are then ended with an
error event; only then does the server close. Hypercorn's own grace (3 s, streams cut without a word) never has anything left to cut.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from hypercorn.asyncio import serve
from hypercorn.config import Config
from starlette.applications import Starlette

from runtime.app import build_app
from runtime.engines.sources import SourceError, local_directory
from sites.config import ConfigError, ListenConfig, SiteConfig, load_site

log = logging.getLogger("pilotlight.site")

PARENT_PID_ENV = "PILOTLIGHT_PARENT_PID"
BACKLOG = 1024
KEEP_ALIVE_S = 75.0  # longer than any client's or router's pool keeps an idle connection: the client closes first, so no request races a close
GRACE_S = 3.0  # for answers whose last bytes are on their way when the drain ends


class StartError(Exception):
    """The site cannot start; the message says what to change."""


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m runtime.serve SITE_FILE", file=sys.stderr)
        return 2
    try:
        return run(load_site(Path(sys.argv[1])))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1


def run(site: SiteConfig, *, on_ready: Callable[[str], None] | None = None) -> int:
    """Returns the process's exit code. `on_ready` gets the URL once the site answers requests with its models loaded."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {site.name} %(levelname)s %(message)s")
    try:
        die_with_parent()
        for model in site.models:
            local_directory(model.source)
        listener = bind(site.listen)
        app = build_app(site)
    except (StartError, ConfigError, SourceError) as error:
        print(f"site {site.name} cannot start: {error}", file=sys.stderr)
        return 1
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve_app(app, site, listener, on_ready=on_ready))
    return 0


async def serve_app(
    app: Starlette,
    site: SiteConfig,
    listener: socket.socket,
    *,
    stop: asyncio.Event | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serves on a bound socket, which it takes over. `stop` begins the drain, as do SIGTERM and SIGINT when none is given; a second
    signal cuts it short."""
    host, port = listener.getsockname()[:2]
    url = app.state.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    log.info("listening on %s", url)
    hurry = asyncio.Event()
    stopping = stop or _stop_on_signals(hurry)
    announcing = asyncio.create_task(_announce(app, url, on_ready), name="announce")

    async def drained() -> None:
        await stopping.wait()
        await _drain(app, site.limits.drain_timeout_s, hurry)

    try:
        await serve(app, hypercorn_config(listener), shutdown_trigger=drained)  # type: ignore[arg-type]
    finally:
        announcing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcing
    log.info("stopped")


def hypercorn_config(listener: socket.socket) -> Config:
    """Hypercorn's defaults are made for short requests; each line here undoes one that hurts streams."""
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG
    config.keep_alive_timeout = KEEP_ALIVE_S  # default 5
    config.keep_alive_max_requests = 2**31  # the default of 1000 fails the HTTP/2 streams in flight when it is reached
    config.h2_max_concurrent_streams = 1024  # default 100: a router's single connection carries all its streams
    config.h11_max_incomplete_size = 64 << 10
    config.graceful_timeout = GRACE_S
    config.include_server_header = False
    config.loglevel = "WARNING"
    return config


def bind(listen: ListenConfig) -> socket.socket:
    """Listens at once, so that a port in use is known before an engine is started for nothing."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
        listener.bind((listen.host, listen.port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        raise StartError(_bind_sentence(listen, error)) from None
    return listener


def _bind_sentence(listen: ListenConfig, error: Exception) -> str:
    code = getattr(error, "errno", None)
    if code == errno.EADDRINUSE:
        return (
            f"port {listen.port} on {listen.host} is in use; stop the process that holds it or set another listen.port"
        )
    if code == errno.EACCES:
        return f"port {listen.port} needs privileges; set a listen.port above 1023"
    return f"cannot listen on {listen.host} port {listen.port}: {error}"


async def _drain(app: Starlette, timeout_s: float, hurry: asyncio.Event) -> None:
    admission, hosts = app.state.admission, app.state.hosts
    admission.draining = True
    log.info("draining: %d requests at work", admission.inflight)
    empty = asyncio.create_task(admission.wait_until_empty())
    hurried = asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait({empty, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not empty.done():
            hosts.fail_open("the site is shutting down and does not wait for this answer any longer")
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


def _stop_on_signals(hurry: asyncio.Event) -> asyncio.Event:
    stop = asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


def die_with_parent() -> None:
    """Where a parent asks for it, the kernel sends SIGTERM when that parent dies, so that no site is left behind."""
    if os.environ.get(PARENT_PID_ENV) != str(os.getppid()) or sys.platform != "linux":
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.environ[PARENT_PID_ENV] != str(os.getppid()):  # it died in between
        raise StartError("the process that started it is gone")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # not made for every platform; asyncio's own loop serves as well, at half the speed
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


if __name__ == "__main__":
    sys.exit(main())
