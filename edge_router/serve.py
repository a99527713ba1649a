"""The router as a process: `python -m edge_router.serve NETWORK_FILE`. Binds, serves, and on SIGTERM drains before it stops.

Knows Hypercorn's traps; what is served is app.py's.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path

from hypercorn.asyncio import serve

from edge_router.app import build_app
from edge_router.proxy import Proxy
from sites.config import ConfigError, NetworkConfig, load_network
from wire.server import ListenError, bind, follow_parent, hypercorn_config, loop_factory, url_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="edge_router.serve", description="Run Pilotlight's edge router.")
    parser.add_argument("network", type=Path, metavar="NETWORK_FILE")
    parser.add_argument("--port", type=int, help="instead of the file's listen.port")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return run(load_network(arguments.network), arguments.port)
    except (ConfigError, ListenError) as error:
        print(f"the router cannot start: {error}", file=sys.stderr)
        return 1


def run(network: NetworkConfig, port: int | None = None) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit status. Raises ListenError for a port that cannot be had."""
    if not follow_parent():
        return 1
    listener = bind(network.listen.host, network.listen.port if port is None else port)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(network, listener))
    return 0


async def _serve(network: NetworkConfig, listener: socket.socket) -> None:
    app = build_app(network)
    url = url_of(listener)
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


if __name__ == "__main__":
    sys.exit(main())
