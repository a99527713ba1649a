"""`pilotlight up`: run a router and its sites as processes of this machine, until they are stopped.

This module starts, restarts and stops the processes, and is independent of their work.
"""

import os
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from pilotlight.runtime.cli.api import DEFAULT_URL
from pilotlight.runtime.cli.child import KILL_AFTER_S, Child
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.local_token import make_local_token
from pilotlight.sites.config import drained_sites_file, state_directory
from pilotlight.sites.network import NetworkConfig, load_network
from pilotlight.sites.site import LOCAL, SiteConfig, load_site
from pilotlight.support.signals import STOP_SIGNALS, TERMINAL, release_signals
from pilotlight.wire.hop.headers import DEPLOY_TOKEN_ENV, HOP_SECRET_ENV

POLL_S = 0.05
RESTART_AFTER_S = 1.0
START_TIMEOUT_S = 120.0


class Stop(Exception):
    """Raised when a stop signal arrives."""


def up(
    network_file: Path,
    sites_dir: Path,
    port: int | None,
    verbose: bool,
    *,
    open_page: bool = False,
    model: str | None = None,
    functions: bool = False,
) -> None:
    """Run a network until a signal stops it.

    `model` is served by all sites instead of the models in their files. With `functions`, all sites serve the functions that are deployed with this
    machine's token. Raises CliError if the network cannot start."""
    source = None if model is None else checked_source(model)
    network = load_network(network_file)
    sites = load_sites(sites_dir, network)
    port = network.listen.port if port is None else port
    require_free(network.listen.host, port, host_key=str(network_file))
    for path, site in sites:
        copies = f" in copies of {network_file} and {sites_dir}, named by --network and --sites"
        port_key = f"listen.port{copies if sites_dir == LOCAL else f' in {path}'}"
        require_free(site.listen.host, site.listen.port, port_key, str(path))
    url = network.listen.url(port)
    children = make_children(network_file, network, port, sites, verbose, source, url if functions else None)
    with suppress(Stop), running(children):
        wait_until_ready(children, network, url)
        greet(url, first_model(source, sites), children, functions=functions)
        if open_page:
            show_page(url)
        keep_alive(children)


def checked_source(model: str) -> str:
    """Return the source of a model for all sites. Raises CliError, once, for what each site would refuse."""
    from pilotlight.runtime.models.sources import SourceError, local_directory, source_of

    source = source_of(model)
    try:
        local_directory(source)
    except SourceError as error:
        raise CliError(str(error)) from None
    return source


def first_model(source: str | None, sites: list[tuple[Path, SiteConfig]]) -> str | None:
    """Return the name of the first model that is served; None if all sites serve functions only."""
    if source is None:
        return next((model.name for _, site in sites for model in site.models), None)
    from pilotlight.runtime.models.sources import name_of

    return name_of(source)


def load_sites(sites_dir: Path, network: NetworkConfig) -> list[tuple[Path, SiteConfig]]:
    """Load the files of the sites, in the order of the network's file.

    Raises ConfigError if a file is missing or invalid, and CliError if it contradicts the network's file."""
    found: list[tuple[Path, SiteConfig]] = []
    for ref in network.sites:
        path = sites_dir / f"{ref.name}.toml"
        site = load_site(path)
        if site.name != ref.name or site.listen.url() != ref.url:
            raise CliError(
                f"{path} is {site.name} at {site.listen.url()}, but the network file says {ref.name} at {ref.url}: make them agree."
            )
        found.append((path, site))
    return found


def make_children(
    network_file: Path,
    network: NetworkConfig,
    port: int,
    sites: list[tuple[Path, SiteConfig]],
    verbose: bool,
    source: str | None = None,
    deployments: str | None = None,
) -> list[Child]:
    """Return the processes of the sites and the router, not started yet, and end drains of sites.

    `source` is the model that all sites serve; None keeps the models in their files. `deployments` is the URL of the router whose deployed functions
    the sites serve."""
    logs = log_directory()
    with suppress(OSError):  # otherwise a network whose sites are all drained would not become ready
        drained_sites_file().unlink(missing_ok=True)
    secret = {HOP_SECRET_ENV: os.environ.get(HOP_SECRET_ENV) or secrets.token_hex(32)}
    changes = [] if source is None else ["--model", source]
    if deployments is not None:
        changes += ["--deployments", deployments]
        secret[DEPLOY_TOKEN_ENV] = os.environ.get(DEPLOY_TOKEN_ENV) or make_local_token(port)
    router = ["pilotlight.edge_router", str(network_file), "--port", str(port)]
    servers = [
        (site.name, ["pilotlight.runtime", str(path), *changes], site.limits.drain_timeout_s) for path, site in sites
    ]
    servers.append(("router", router, network.relay.drain_timeout_s))
    return [
        Child(name, arguments, logs / f"{name}.log", secret, verbose, drain_s) for name, arguments, drain_s in servers
    ]


def log_directory() -> Path:
    logs = state_directory("logs")
    try:
        logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        logs.chmod(0o700)  # an earlier version may have created it with another mode
        with tempfile.TemporaryFile(dir=logs):
            return logs
    except OSError:
        return Path(tempfile.mkdtemp(prefix="pilotlight-logs-"))


def require_free(host: str, port: int, port_key: str = "--port", host_key: str = "--host") -> None:
    """Raise CliError with the option or key to change if a server cannot listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            from pilotlight.wire.http.listen import bind_sentence  # imported here: asyncio would delay a start by 50 ms

            raise CliError(f"{bind_sentence(host, port, error, port_key, host_key)}.") from None


@contextmanager
def running(children: list[Child]) -> Iterator[None]:
    """Open a scope in which the children run. They are stopped at its end in any case.

    Ctrl-C, SIGTERM and a closed terminal raise Stop in it; any other SIGHUP is passed on to the children, and
    SIGUSR2 is ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    def hang_up(number: int, frame: FrameType | None) -> None:
        if TERMINAL.is_gone:
            raise Stop
        for child in children:
            child.hang_up()

    handlers: dict[int, Callable[[int, FrameType | None], None] | signal.Handlers] = {
        number: stop for number in STOP_SIGNALS
    }
    handlers |= {signal.SIGHUP: hang_up, signal.SIGUSR2: signal.SIG_IGN}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        for child in children:
            child.start()
        release_signals()
        yield
    except Stop:
        print("Stopping: open streams may finish; Ctrl-C again stops at once.", flush=True)
        raise
    finally:
        with suppress(Stop):  # a further Ctrl-C, while the children are killed
            end(children)
        for number, handler in previous.items():
            signal.signal(number, handler)


def end(children: list[Child]) -> None:
    """Stop the children, the router first: it drains while the sites still respond."""
    try:
        for child in reversed(children):
            child.terminate()
        began = time.monotonic()
        for child in reversed(children):
            child.wait(max(0.0, began + child.drain_timeout_s + KILL_AFTER_S - time.monotonic()))
    except Stop:
        pass
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait(KILL_AFTER_S)


def wait_until_ready(children: list[Child], network: NetworkConfig, url: str) -> None:
    """Show the start of the router at `url` and of its sites, until all are ready.

    Raises CliError if one of them cannot start.
    """
    print("Starting Pilotlight: a router and its sites on this machine.", flush=True)
    # Imported while the children import, too: rich takes 0.1 s.
    from rich.console import Console

    from pilotlight.runtime.cli.start_progress import ServerStart, StartProgress

    servers = [ServerStart("router", url, publishes_status=False)]
    servers += [ServerStart(ref.name, ref.url, publishes_status=True) for ref in network.sites]
    progress = StartProgress(Console(), servers)
    deadline = time.monotonic() + START_TIMEOUT_S
    with progress.shown():
        while not progress.poll():
            for child in children:
                if child.exit_code is not None:
                    raise CliError(f"{child.name} did not start: {child.last_line()} (log: {child.log})")
            for server in servers:
                if server.failure is not None:
                    raise CliError(f"{server.name} did not start: {server.failure}")
            if time.monotonic() > deadline:
                late = ", ".join(f"{server.name} ({server.state})" for server in servers if not server.ready)
                raise CliError(
                    f"Not ready after {START_TIMEOUT_S:.0f} s: {late}. Logs are in {children[0].log.parent}."
                )
            time.sleep(POLL_S)


def greet(url: str, model: str | None, children: list[Child], *, functions: bool) -> None:
    """Print the network's URL and an example request.

    `model` is None if all sites serve functions only.
    """
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "What is the airport code of Lisbon?"}}]}}'
    command = f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    where = "" if url == DEFAULT_URL else f" --url {url}"
    see = "Open that address in a browser to see the network"
    lines = [
        f"Pilotlight is ready: {url}",
        "",
        *([f"{see} and talk to it, or:", f"  {command}"] if model is not None else [f"{see}."]),
        "",
        *([f"Functions: pilotlight init hello && pilotlight deploy hello{where}", ""] if functions else []),
        f"Logs: {children[0].log.parent}   Ctrl-C stops everything.",
    ]
    print("\n".join(lines), flush=True)


def show_page(url: str) -> None:
    import webbrowser  # imported here: few starts open a browser

    if not webbrowser.open(url):
        print(f"No browser could be started: open {url} in one.", flush=True)


def keep_alive(
    children: list[Child],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Restart each server that ends; meanwhile the other servers answer its requests."""
    while True:
        sleep(0.25)
        for child in children:
            if child.exit_code is not None:
                print(f"{child.name} ended ({child.last_line()}); starting it again.", flush=True)
                sleep(max(0.0, child.started_at + RESTART_AFTER_S - clock()))
                child.start()
