"""`pilotlight dev`: serve the function of a folder at `/` of a port, and reload it at each change.

The function has its bindings and the embedded model. The command runs one site in this process; the function's output and errors go to the terminal.
"""

import asyncio
import logging
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import UNNUMBERED, ScheduledEvent
from pilotlight.functions.cli.d1_commands import migration_notes
from pilotlight.functions.manifest import Manifest, ManifestError, load_manifest
from pilotlight.functions.routes.invocations import FunctionRoute, at_path
from pilotlight.functions.served import ServedFunctions
from pilotlight.runtime.app import SiteApp, build_app
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.serve import ShutdownHooks, StartError, serve_app
from pilotlight.sites.config import parse
from pilotlight.sites.rules import is_loopback
from pilotlight.sites.site import SiteConfig
from pilotlight.wire.http.listen import ListenError, bind, loop_factory, url_of

STATE = ".pilotlight"  # folder inside the function's folder that keeps the data of its bindings
LOOK_S = 0.25
# Time for open requests when the command is stopped, and then for their last bytes. A site gives half a minute, but an author wants the terminal
# back.
GRACE_S, LAST_BYTES_S = 2.0, 0.2
SKIPPED = ("__pycache__", "node_modules")
OUTPUTS = (1, 2)  # file descriptors of this process's output
MODEL = "embedded:ember"

Seen = dict[Path, tuple[int, int]]


class DevOptions(NamedTuple):
    host: str
    port: int
    environment: str | None = None
    models: tuple[str, ...] = ()  # each is SOURCE, or NAME=SOURCE
    egress_allow: tuple[str, ...] = ()
    open_to_all: bool = False


def dev(directory: Path, options: DevOptions) -> None:
    """Serve the function until interrupted. Raises CliError."""
    host, port, environment = options.host, options.port, options.environment
    if not (options.open_to_all or is_loopback(host)):
        raise CliError(f"{host} is reachable from other machines: use --open-to-all to serve every client.")
    manifest = load_manifest(directory, environment)
    console = Console()
    _print_logs(console)
    try:
        listener = bind(host, port, port_key="--port", host_key="--host")
        app = dev_app(manifest, site_of(manifest, options), url_of(listener))
    except ListenError as error:
        raise CliError(str(error)) from None

    async def serve() -> None:
        watching = asyncio.create_task(watch(app, directory, environment, lambda line: _say(console, line)))
        try:
            await serve_app(app, listener, hooks=shutdown_hooks(lambda line: _say(console, line)))
        finally:
            watching.cancel()

    _say(console, f"{manifest.name}: {directory.resolve()}")
    for note in manifest.notes:
        _say(console, f"  {note}")
    if environment is None:  # commands of D1 know no environments
        for note in migration_notes((each.name for each in manifest.bindings if each.kind == "d1"), directory):
            _say(console, f"  {note}")
    for mistake in syntax_errors(sorted(snapshot(manifest.main.parent))):
        _say(console, mistake)
    _say(console, f"Serving {_opened_at(host, port)} (Ctrl-C stops)")
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(serve())
    except StartError as error:
        raise CliError(str(error)) from None


def _opened_at(host: str, port: int) -> str:
    """Return the URL at which a browser on this machine reaches a listening address."""
    name = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"


def site_of(manifest: Manifest, options: DevOptions) -> SiteConfig:
    """Return the configuration of a site that serves one function, with the requested models."""
    ai = next((binding for binding in manifest.bindings if binding.kind == "ai"), None)
    models = (
        models_of(options.models, {}, "disk")
        if ai is None
        else models_of(options.models, ai.options["aliases"], "device")
    )
    values = {
        "name": "dev",
        "place": {"city": "here", "latitude": 0.0, "longitude": 0.0},
        "listen": {"host": options.host, "port": options.port},
        "door": {"open_to_all": options.open_to_all},
        "limits": {"drain_timeout_s": GRACE_S},
        "models": models,
        "functions": {
            "serve": [{"name": manifest.name, "path": str(manifest.directory), "environment": options.environment}],
            "show_errors": True,
            "state_dir": str(manifest.directory / STATE),
            "egress_allow": ["localhost", "127.0.0.1", *options.egress_allow],
        },
    }
    return parse(SiteConfig, values, "pilotlight dev")


def models_of(given: Iterable[str], aliases: Mapping[str, str], residency: str) -> list[dict[str, Any]]:
    """Return the models' configuration tables; several names may refer to one model.
    Names of the command line override those of the manifest."""
    pairs = [part.partition("=") if "=" in part else ("", "", part) for part in given]
    wanted = {**aliases, **{name: source for name, _, source in pairs if name}}
    sources = dict.fromkeys([_source(source) for name, _, source in pairs if not name])
    sources |= dict.fromkeys(_source(source) for source in wanted.values())
    tables = []
    for source in sources or {MODEL: None}:
        name = source.removeprefix("embedded:").rstrip("/").rsplit("/", 1)[-1]
        further = [alias for alias, means in wanted.items() if _source(means) == source and alias != name]
        tables.append(
            {"name": name, "source": source, "aliases": [f"@pilotlight/{name}", *further], "residency": residency}
        )
    return tables


def _source(model: str) -> str:
    return MODEL if model == MODEL.removeprefix("embedded:") else model


def dev_app(manifest: Manifest, site: SiteConfig, url: str | None = None) -> SiteApp:
    """Return the site's application, in which the function answers all paths but the site's own."""
    app = build_app(site, url=url, functions_path="/")
    served = _served(app)
    route = FunctionRoute(served.functions, served.version_of, app.site.admission, show_errors=True, name=manifest.name)
    clock = _ScheduledTrigger(served, manifest.name)
    app.router.routes[0:0] = [
        app.routes_beside("/_pilotlight"),
        Route("/cdn-cgi/handler/scheduled", clock.fire, methods=["GET", "POST"]),
        *at_path(route, "/{path:rest}"),
    ]
    return app


def _served(app: SiteApp) -> ServedFunctions:
    assert app.functions is not None, "its site serves a function"
    return app.functions.served


def shutdown_hooks(say: Callable[[str], None]) -> ShutdownHooks:
    def drained(num_open: int) -> None:
        if num_open:
            say(f"Stopping: {_requests(num_open)} may take {GRACE_S:g} s to end (Ctrl-C again ends them now)")

    return ShutdownHooks(drained, lambda num_open: say(f"Ended {_requests(num_open)}"), LAST_BYTES_S)


def _requests(count: int) -> str:
    return "1 open request" if count == 1 else f"{count} open requests"


class _ScheduledTrigger:
    """Runs the `scheduled` handler on request, at the path that the platform's local server uses."""

    def __init__(self, served: ServedFunctions, name: str) -> None:
        self._served = served
        self._name = name

    async def fire(self, request: Request) -> Response:
        given = request.query_params
        at_ms = given.get("time", "")
        scheduled_time_ms = int(at_ms) if at_ms.isascii() and at_ms.isdigit() else int(time.time() * 1000)
        try:
            event = ScheduledEvent(UNNUMBERED, given.get("cron", ""), scheduled_time_ms)
            await self._served.functions.ask(self._name, event)
        except Failure as failure:
            return PlainTextResponse(failure.detail or failure.message, 500)
        return PlainTextResponse("ok")


async def watch(app: SiteApp, directory: Path, environment: str | None, say: Callable[[str], None]) -> None:
    """Reload the function whenever its files change.
    If the manifest is invalid, the last valid version stays in place."""
    served = _served(app)
    name, config = served.config.serve[0].name, served.config.serve[0]
    layers = (Path(config.layer),) if config.layer else ()
    seen = await asyncio.to_thread(snapshot, directory)
    while True:
        await asyncio.sleep(LOOK_S)
        now = await asyncio.to_thread(snapshot, directory)
        if now == seen:
            continue
        paths = (seen.keys() ^ now.keys()) | {path for path in now if seen.get(path) != now[path]}
        changed = sorted({path.name for path in paths})
        seen = now
        for mistake in syntax_errors(sorted(paths & now.keys())):
            say(mistake)
        began = time.perf_counter()
        try:
            manifest = load_manifest(directory, environment)
            served.add(manifest, name=name, layers=layers)
        except ManifestError as error:
            say(f"not reloaded: {error}")
            continue
        for note in manifest.notes if any(path.name.startswith("wrangler.") for path in paths) else ():
            say(f"  {note}")
        say(f"reloaded after {', '.join(changed[:3])} ({1e3 * (time.perf_counter() - began):.0f} ms)")


def syntax_errors(paths: Iterable[Path]) -> list[str]:
    """Return the syntax errors in the author's Python files, so that they are shown before any request."""
    found = []
    for path in paths:
        if path.suffix == ".py" and "python_modules" not in path.parts:
            try:
                compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                found.append("".join(traceback.format_exception_only(error)).rstrip())
            except OSError:
                continue  # deleted meanwhile
    return found


def snapshot(directory: Path, outputs: Collection[int] = OUTPUTS) -> Seen:
    """Return (modification time in ns, size) of every file that may be part of the function.
    Log files and this process's own output are left out, because each reload writes to them."""
    found: Seen = {}
    try:
        paths = list(directory.iterdir())
    except OSError:
        return found  # deleted, or not readable
    for path in paths:
        if path.name in SKIPPED or (path.name.startswith(".") and not path.name.startswith((".dev.vars", ".env"))):
            continue
        if path.is_dir():
            if not path.is_symlink():  # it may lead to a parent; a bundle has no links either
                found |= snapshot(path, outputs)
            continue
        try:
            status = path.stat()
        except OSError:
            continue  # deleted meanwhile
        if path.suffix == ".log" or _is_output(status, outputs):
            continue
        found[path] = status.st_mtime_ns, status.st_size
    return found


def _is_output(status: os.stat_result, outputs: Collection[int]) -> bool:
    with suppress(OSError):  # an output may be closed
        return any(os.path.samestat(status, os.fstat(output)) for output in outputs)
    return False


class _Lines(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        _say(self._console, record.getMessage())


def _print_logs(console: Console) -> None:
    """Print the function's output, and only errors of the site."""
    handler = _Lines(console)
    function = logging.getLogger("pilotlight.function")
    function.setLevel(logging.INFO)
    function.addHandler(handler)
    function.propagate = False
    logging.getLogger("pilotlight").addHandler(handler)
    logging.getLogger("pilotlight").setLevel(logging.ERROR)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
