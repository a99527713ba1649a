"""The router as a process: `python -m pilotlight.edge_router NETWORK_FILE`.

It binds, serves, and on SIGTERM drains before it stops. SIGHUP reads the file again. With `--workers N` it supervises N processes that do so
(workers/supervisor.py); a worker is replaced by its successor at SIGUSR2. This module determines the order of start and stop; routes are in app.py.
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pilotlight.edge_router.app import RouterApp, build_app
from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.requests.function_hosts import FunctionMount
from pilotlight.edge_router.requests.request import FUNCTIONS
from pilotlight.edge_router.workers.role import WorkerRole, check_workers
from pilotlight.edge_router.workers.siblings import PrivateApp, private_listener
from pilotlight.edge_router.workers.supervisor import supervise
from pilotlight.sites.config import SERVER_ENV, ConfigError, check_secrets
from pilotlight.sites.network import DoorConfig, NetworkConfig, load_network
from pilotlight.sites.reloading import read_again
from pilotlight.sites.rules import is_loopback
from pilotlight.support import background
from pilotlight.support.logs import start_logging
from pilotlight.support.service_manager import notify_ready
from pilotlight.support.signals import follow_signals, release_signals
from pilotlight.wire.hop.headers import DEPLOY_TOKEN_ENV, HOP_SECRET_ENV, OVERLOADED
from pilotlight.wire.http.access_log import AccessLog
from pilotlight.wire.http.certificate import Certificate
from pilotlight.wire.http.connection import HttpLimits
from pilotlight.wire.http.listen import (
    GRACE_S,
    ListenError,
    bind,
    file_limit,
    follow_parent,
    loop_factory,
    raise_file_limit,
    url_of,
)
from pilotlight.wire.http.middleware import BodyBudget, OriginCheck, Origins
from pilotlight.wire.http.server import Server
from pilotlight.wire.http.stock_servers import SERVERS, HttpServer, check_installed, make_server
from pilotlight.wire.paths import API_PATHS

log = logging.getLogger("pilotlight.router")

RELEASE_LIMIT_S = 5.0  # time for last requests to a first worker that is replaced
RETIRE_LIMIT_S = 3600.0  # time for the streams of a replaced worker to end; then it drains
SPARE_FILES = 64  # file descriptors for probes, logs, Python's files, and clients that are being refused


def main() -> int:
    parser = argparse.ArgumentParser(prog="pilotlight.edge_router", description="Run Pilotlight's edge router.")
    parser.add_argument("network", type=Path, metavar="NETWORK_FILE")
    parser.add_argument("--port", type=int, help="instead of the file's listen.port")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the port (1)")
    parser.add_argument("--server", choices=SERVERS, help="instead of the file's door.server")
    arguments = parser.parse_args()
    if arguments.server is not None:
        os.environ[SERVER_ENV] = arguments.server
    try:
        return run(load_network(arguments.network), arguments.port, arguments.network, arguments.workers)
    except (ConfigError, ListenError) as error:
        print(f"the router cannot start: {error}", file=sys.stderr)
        return 1


def run(network: NetworkConfig, port: int | None = None, file: Path | None = None, workers: int = 1) -> int:
    """Serve until a stop signal; return the exit status.
    The network was read from `file`, which is read again at SIGHUP. Raises ListenError for a port that cannot be opened, and ConfigError."""
    role = WorkerRole.present()
    name = "router" if role is None else f"router/{role.index}"
    start_logging(name, network.telemetry.log_level, network.telemetry.log_format)
    if not follow_parent():
        return 1
    of_file = "" if HOP_SECRET_ENV in os.environ else network.hop.secret()
    if of_file:
        os.environ[HOP_SECRET_ENV] = of_file
    check_secrets(HOP_SECRET_ENV, DEPLOY_TOKEN_ENV)
    raise_file_limit()
    check_installed(network.door.server_name)
    listen = network.listen
    port = listen.port if port is None else port
    check_workers(network, workers)
    if workers > 1 and role is None and file is not None:
        if of_file:  # each worker reads the file, because a later one must have the secret of its time
            del os.environ[HOP_SECRET_ENV]
        arguments = ["pilotlight.edge_router", str(file)]
        is_tls, drain_timeout_s = listen.tls_certificate is not None, network.relay.drain_timeout_s
        return supervise(arguments, listen.host, port, workers, is_tls=is_tls, drain_timeout_s=drain_timeout_s)
    listener = bind(listen.host, port) if role is None else role.listening()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(network, listener, file, role))
    return 0


async def _serve(network: NetworkConfig, listener: socket.socket, file: Path | None, role: WorkerRole | None) -> None:
    app = build_app(network, file=file, role=role)
    url = url_of(listener, is_tls=network.listen.tls_certificate is not None)
    stop, stop_now, retiring = asyncio.Event(), asyncio.Event(), asyncio.Event()
    proxy = app.edge.proxy

    def signalled() -> None:
        (stop_now if stop.is_set() else stop).set()

    follow_signals(signalled, lambda: reload(app, network, file), network.relay.drain_timeout_s)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(app, network, listener))
        if role is not None:
            await stack.enter_async_context(_answering_workers(app, role))
            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, retiring.set)
        gc.collect()
        gc.set_threshold(10_000, 20, 50)  # a request creates some hundred objects, of which hardly any are in a cycle
        gc.freeze()  # exempt all present objects from garbage collection
        log.info("listening on %s", url)
        notify_ready(f"listening on {url}")
        release_signals()
        if role is not None:
            role.ready_file(os.getpid()).touch()
        await _first_of(stop.wait(), retiring.wait())
        if not stop.is_set() and isinstance(server, Server):
            server.retire()
            await _first_of(stop.wait(), proxy.idle(RETIRE_LIMIT_S))
            if app.siblings is not None:
                await _first_of(stop.wait(), app.siblings.resign(lambda: _release(app)))
        await drain(proxy, network.relay.drain_timeout_s, stop_now)
        app.edge.tunnels.end()
        await app.response_sockets.end()


async def _release(app: RouterApp) -> None:
    """Answer the requests that have come before, and close the stored responses."""
    await app.edge.proxy.idle(RELEASE_LIMIT_S)
    await app.responses.close()


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of the tasks ends, and cancel the other tasks."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await background.stop(*tasks)


LIVE = (
    "sites",
    "accounts",
    "keys",
    "prices",
    "models",
    "hosts",
    "functions.domain",
    "tenant_limits",
    "door.require_key",
    "door.max_open_per_client",
)


def reload(app: RouterApp, network: NetworkConfig, file: Path | None) -> None:
    """Apply changed sites, keys, limits, prices and data rules. Certificates are reloaded without SIGHUP."""
    found = None if file is None else read_again(network, file, load_network, LIVE)
    if found is not None:
        try:
            app.reload(found)
        except ConfigError as error:
            log.error("SIGHUP: the previous configuration stays in use: %s", error)


@asynccontextmanager
async def serving(app: RouterApp, network: NetworkConfig, listener: socket.socket) -> AsyncIterator[HttpServer]:
    """Serve the application on the socket, which the server closes."""
    door = network.door
    origins = Origins(
        is_local=is_loopback(network.listen.host) and not door.open_to_all,
        hosts=door.hosts,
        cors_origins=door.cors_origins,
        own_cors=FUNCTIONS,
        api_paths=API_PATHS,
    )
    budget = BodyBudget(app, int(door.max_bodies_mib * 2**20))
    # A function's own host name is allowed as well, so requests for it are dispatched before the check of host names.
    mounted = FunctionMount(app.edge.hosts, budget, OriginCheck(budget, origins))
    outermost = AccessLog(mounted) if network.telemetry.access_log else mounted
    server = make_server(door.server_name, outermost, http_limits(door, file_limit()), overload_headers=OVERLOADED)
    metrics = app.edge.metrics
    metrics.watch("body_bytes", "Memory of the bodies of requests in progress.", lambda: budget.held_bytes)
    if isinstance(server, Server):
        connections = server.connections
        metrics.watch("connections", "Connections of clients.", lambda: len(connections))
    listen = network.listen
    certificate = Certificate.of(listen.tls_certificate, listen.tls_key, http2=door.server_name == "hypercorn")
    if certificate is not None:
        about = "When the certificate of this listener ends, in seconds since the epoch."
        metrics.watch("certificate_ends_seconds", about, lambda: certificate.ends_s)
    async with app.router.lifespan_context(app):
        await server.start(listener, certificate.context if certificate else None)
        watch = background.start(certificate.watch, "the watch over the certificate") if certificate else None
        try:
            yield server
        finally:
            if watch is not None:
                await background.stop(watch)
            await server.stop(GRACE_S)


@asynccontextmanager
async def _answering_workers(app: RouterApp, role: WorkerRole) -> AsyncIterator[None]:
    """Answer the requests of the other workers of this router."""
    server = Server(PrivateApp(app, app.edge.metrics.render), HttpLimits(max_message_bytes=0))
    async with private_listener(role) as listener:
        await server.start(listener)
        try:
            async with background.running(partial(_lead, app), "the wait for the first worker's end"):
                yield
        finally:
            await server.stop(GRACE_S)


async def _lead(app: RouterApp) -> None:
    """Do the work of the first worker, when no other worker is the first."""
    assert app.siblings is not None, "it has a role"
    await app.siblings.take_over()
    await app.responses.run()


def http_limits(door: DoorConfig, files: int | None) -> HttpLimits:
    """Limit connections to the number of file descriptors, with one connection to a site for each.

    Further clients get an error instead of waiting for an accept that fails.
    """
    return HttpLimits(
        max_head_bytes=door.max_head_kib << 10,
        max_headers=door.max_headers,
        head_timeout_s=door.head_timeout_s,
        keep_alive_s=door.keep_alive_s,
        stall_s=door.stall_timeout_s,
        max_unread_bytes=int(door.max_unread_mib * 2**20),
        max_connections=door.max_connections
        if files is None
        else min(door.max_connections, max(1, (files - SPARE_FILES) // 2)),
        max_connections_per_client=door.max_connections_per_client,
    )


async def drain(proxy: Proxy, timeout_s: float, stop_now: asyncio.Event) -> None:
    """Drain within the timeout. After a second stop signal open streams get their error event at once."""
    await _first_of(proxy.drain(timeout_s), stop_now.wait())
    if stop_now.is_set():
        await proxy.drain(0)
