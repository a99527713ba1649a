"""The router as a process: `python -m edge_router.serve NETWORK_FILE`. Binds, serves, and on SIGTERM drains before it stops.

Knows Hypercorn's traps; what is served is app.py's.
"""

import argparse
import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import uvloop
from hypercorn.asyncio import serve
from hypercorn.config import Config

from edge_router.app import build_app
from edge_router.proxy import Proxy
from sites.config import ConfigError, ListenConfig, NetworkConfig, load_network

PARENT_ENV = "PILOTLIGHT_PARENT_PID"
PR_SET_PDEATHSIG = 1
BACKLOG = 2048


def run(network: NetworkConfig) -> None:
    """Serves until SIGTERM or SIGINT. A port that cannot be had ends the process with one sentence and status 1."""
    follow_parent()
    listener = listen(network.listen)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(network, listener))


def listen(config: ListenConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Linux hands the option on to accepted sockets. Without it Nagle's algorithm and delayed acknowledgements hold a small event for 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        where = f"{config.host}:{config.port}"
        if error.errno == errno.EADDRINUSE:
            raise SystemExit(
                f"The router cannot listen on {where}: the port is in use. Stop the process that holds it "
                f"(`ss -ltnp 'sport = :{config.port}'` names it) or change listen.port in the network file."
            ) from None
        raise SystemExit(
            f"The router cannot listen on {where}: {error.strerror}. Change [listen] in the network file."
        ) from None
    return listener


def follow_parent() -> None:
    """Dies with the process that started it, where that process asked for it: a killed `pilotlight up` leaves nothing behind."""
    if os.environ.get(PARENT_ENV) != str(os.getppid()) or not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call
        raise SystemExit("The process that started the router has ended.")


def hypercorn_config(listener: socket.socket) -> Config:
    """The defaults assume short requests."""
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]
    config.backlog = BACKLOG  # 100
    config.keep_alive_timeout = (
        75  # 5 s: clients' pools (aiohttp keeps a connection for 15 s) would race with the close
    )
    config.keep_alive_max_requests = sys.maxsize  # 1000, and reaching it fails HTTP/2 streams in flight
    config.h2_max_concurrent_streams = 1024  # 100
    config.h11_max_incomplete_size = 64 * 1024  # of a request's head; 16 KiB
    config.graceful_timeout = 1  # we drain before Hypercorn hears of it; what is left then is idle connections
    config.include_server_header = False
    config.loglevel = "WARNING"
    return config


async def _serve(network: NetworkConfig, listener: socket.socket) -> None:
    app = build_app(network)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (stop_now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled)

    async def until_drained() -> None:
        """Hypercorn awaits this once it accepts connections, and stops when it returns."""
        print(f"The router listens on {url}", flush=True)
        await stop.wait()
        await _drain(app.state.proxy, network.relay.drain_timeout_s, stop_now)

    await serve(app, hypercorn_config(listener), shutdown_trigger=until_drained)  # type: ignore[arg-type]


async def _drain(proxy: Proxy, timeout_s: float, stop_now: asyncio.Event) -> None:
    """A second signal ends the patience: open streams get their error event at once."""
    draining = asyncio.ensure_future(proxy.drain(timeout_s))
    hurry = asyncio.ensure_future(stop_now.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await proxy.drain(0)
    hurry.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await draining


def main() -> None:
    parser = argparse.ArgumentParser(prog="edge_router.serve", description="Run Pilotlight's edge router.")
    parser.add_argument("network", type=Path, metavar="NETWORK_FILE")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        network = load_network(parser.parse_args().network)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    run(network)


if __name__ == "__main__":
    main()
