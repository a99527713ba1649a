"""`pilotlight secret`, `kv` and `queues`: read and change the data of bindings on this machine.

The function need not run. The commands work on the state directory of a site, or of a folder that `pilotlight dev` serves. They run the bindings' own
code, so they refuse what a binding refuses, and a running site sees the changes. Imports are local to the commands, to start fast.
"""

import json
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.runtime.cli.api import DEFAULT_URL, Api
from pilotlight.runtime.cli.cli_error import CliError

if TYPE_CHECKING:
    from pilotlight.functions.bindings.binding import Binding, Services
    from pilotlight.functions.bindings.secrets.secret_store import SecretStore
    from pilotlight.functions.manifest import BindingDeclaration, Manifest

DEV_STATE = ".pilotlight"
NAMES = (
    "database_name",
    "database_id",
    "id",
    "queue",
    "bucket_name",
    "index_name",
    "dataset",
)  # options that name a store
HERE = Path(".")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
SiteOption = Annotated[
    Path | None, typer.Option("--site", help="A site's file; the command must run on that site's machine.")
]
DirOption = Annotated[Path, typer.Option("--dir", help="Folder of a function that `pilotlight dev` serves.")]

FunctionArgument = Annotated[str, typer.Argument(help="Name of a function, or with --store the id of a secrets store.")]
StoreOption = Annotated[bool, typer.Option("--store", help="Use a secrets store, which several functions may bind.")]

RemoteOption = Annotated[
    bool, typer.Option("--remote", help="Use the router, which reaches every site where the function runs or will run.")
]
UrlOption = Annotated[str, typer.Option(help="URL of the router.", envvar="PILOTLIGHT_URL")]

secret = typer.Typer(help="Secrets of functions, encrypted on this machine.", no_args_is_help=True)
kv = typer.Typer(help="Keys of a KV namespace, named by its binding or id.", no_args_is_help=True)
queues = typer.Typer(help="Messages in queues.", no_args_is_help=True)


class State:
    """A state directory, and the manifest that declares its stores, if there is one."""

    def __init__(self, site: Path | None, directory: Path) -> None:
        from pilotlight.functions.manifest import FILES, load_manifest
        from pilotlight.functions.state_dir import state_dir_of
        from pilotlight.runtime.cli.operations.state_roots import check_owner
        from pilotlight.sites.site import load_site

        self._site = None if site is None else load_site(site)
        self.directory = directory / DEV_STATE if self._site is None else state_dir_of(self._site)
        if self.directory.is_dir():
            check_owner(self.directory)
        has_manifest = any((directory / name).is_file() for name in FILES)
        if site is None and not has_manifest:
            raise CliError(
                f"{directory} has no manifest: name a function's folder with --dir, or a site's file with --site."
            )
        self._manifest = self._as_served(load_manifest(directory)) if has_manifest else None

    def _as_served(self, manifest: "Manifest") -> "Manifest":
        """Return a manifest with the names that its stores have here: those of a deployed function differ."""
        if self._site is None or self._site.functions.deployments is None:
            return manifest
        from pilotlight.functions.bindings.owners import with_own_stores
        from pilotlight.functions.site_file import manifests_of

        return manifest if manifest.name in manifests_of(self._site.functions) else with_own_stores(manifest)

    def declared(self, kind: str, name: str) -> "BindingDeclaration":
        """Return the declaration of a binding by its name, by wrangler's name for the store, or by its id.
        Raises CliError."""
        from pilotlight.functions.manifest import BindingDeclaration

        declared = [each for each in self._manifest.bindings if each.kind == kind] if self._manifest is not None else []
        for declaration in declared:
            if name in (declaration.name, *(declaration.options.get(key) for key in NAMES)):
                return declaration
        if not self._is_store(kind, name):
            unknown = f"There is no {kind.partition('_')[0]} {name!r}"
            if self._manifest is not None:
                raise CliError(f"{unknown}: the manifest's are {', '.join(each.name for each in declared) or 'none'}.")
            known = ", ".join(self._stores(kind)) or "none"
            raise CliError(
                f"{unknown} at this site, which has {known}. Names of bindings need --dir with their function's folder."
            )
        return BindingDeclaration(
            kind, name, dict.fromkeys(("id", "database_id", "queue", "bucket_name", "dataset"), name)
        )

    def has_data(self, kind: str, name: str) -> bool:
        """Tell whether a store of this name exists. Raises CliError if nothing declares it."""
        from pilotlight.functions.bindings.owners import store_of

        store = store_of(self.declared(kind, name))
        return store is None or self._exists(*store)

    def file_of(self, kind: str, name: str, file: str) -> Path:
        """Return the path of a store's file. Raises CliError if it does not exist."""
        from pilotlight.functions.bindings.owners import store_of

        store = store_of(self.declared(kind, name))
        assert store is not None, "only stores have files"
        path = self.folder(*store) / file
        if not path.is_file():
            raise CliError(f"{name} has no data here: there is no {path}.")
        return path

    def _is_store(self, kind: str, name: str) -> bool:
        """Tell whether a store of this id exists, or the function consumes a queue of this name.
        Without this check a misspelt name would create a store."""
        consumed = {consumer.queue for consumer in self._manifest.consumers} if self._manifest is not None else set()
        return (kind == "queue_producer" and name in consumed) or self._exists(kind, name)

    def _exists(self, kind: str, id: str) -> bool:
        return (kind == "r2" and id in self._r2()) or self.folder(kind, id).is_dir()

    def _stores(self, kind: str) -> list[str]:
        """Return the ids of the existing stores of a kind."""
        from pilotlight.functions.bindings.owners import id_in

        folder = self.folder(kind, "any").parent
        found = {id_in(path) for path in folder.iterdir() if path.is_dir()} if folder.is_dir() else set()
        return sorted(found.union(self._r2() if kind == "r2" else ()))

    def folder(self, kind: str, id: str) -> Path:
        from pilotlight.functions.bindings.owners import folder_of
        from pilotlight.functions.bindings.place import directory_of

        return directory_of(self.directory, folder_of(kind), id)

    def bound(self, kind: str, name: str, work: "Callable[[Binding], Awaitable[Any]]", *, creates: bool = False) -> Any:
        """Return the result of `work` on an opened binding.
        Only with `creates` may its store be new. Raises CliError."""
        from pilotlight.functions.bindings.registry import open_binding

        declaration = self.declared(kind, name)
        if not creates and not self.has_data(kind, name):
            raise CliError(f"{name} has no data in {self.directory}.")
        return self._run(lambda services: work(open_binding(declaration, self.directory, services)))

    def queue(self, folder: Path, method: str) -> int:
        """Call a method ("depth" or "purge") of the queue in a folder; return its result."""
        from pilotlight.functions.bindings.queues import Queue

        async def work(services: "Services") -> int:
            queue = Queue(folder.name, folder / "messages.sqlite", services.max_bytes)
            try:
                return int(await getattr(queue, method)())
            finally:
                await queue.close()

        found: int = self._run(work)
        return found

    def secrets(self, work: "Callable[[SecretStore], Any]") -> Any:
        from pilotlight.functions.bindings.secrets.secret_store import SecretError, SecretStore

        try:
            return work(SecretStore(self.directory))
        except SecretError as error:
            raise CliError(str(error)) from None

    def _r2(self) -> dict[str, Any]:
        """Return the site's buckets at S3 endpoints, by R2 name."""
        if self._site is None or not self._site.functions.r2:
            return {}
        from pilotlight.functions.site_file import r2_stores

        return dict(r2_stores(self._site.functions))

    def _history_s(self) -> float:
        from pilotlight.sites.site import FunctionsConfig

        functions = FunctionsConfig() if self._site is None else self._site.functions
        return functions.history_days * 24 * 3600.0

    def _run(self, work: "Callable[[Services], Awaitable[Any]]") -> Any:
        from pilotlight.functions.bindings.binding import BindingError, Services

        async def run() -> Any:
            services = Services(r2=self._r2(), history_s=self._history_s())
            try:
                return await work(services)
            finally:
                await services.databases.close()

        try:
            import asyncio

            return asyncio.run(run())
        except BindingError as error:
            raise CliError(error.message) from None


def contents(path: Path) -> bytes:
    """Return a file's bytes. Raises CliError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CliError(f"{path} cannot be read: {error.strerror}.") from None


def moment_of(text: str) -> float:
    """Return the Unix time in seconds that `text` names.

    `text` is an age (10m, 2h, 7d), a Unix time, or an ISO 8601 date or time. Raises CliError.
    """
    if age := re.fullmatch(r"(\d{1,9})([smhd])", text):
        return time.time() - int(age[1]) * UNITS[age[2]]
    try:
        return float(text) if re.fullmatch(r"[\d.]+", text) else datetime.fromisoformat(text).timestamp()
    except ValueError:
        sentence = "give an age such as 10m, 2h or 7d, seconds since 1970, or a time such as 2026-11-28T18:00:00Z"
        raise CliError(f"{text!r} is not a time: {sentence}.") from None


async def pages(binding: "Binding", **asked: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield all pages of a binding's list."""
    cursor: str | None = ""
    while cursor is not None:
        page = await binding.call("list", [], {**asked, "cursor": cursor or None})
        yield page
        cursor = page.get("cursor")


@secret.command("put")
def secret_put(
    function: FunctionArgument,
    name: str,
    site: SiteOption = None,
    directory: DirOption = HERE,
    store: StoreOption = False,
    remote: RemoteOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Store a secret, whose value is read from standard input."""
    value = sys.stdin.read().rstrip("\n") if not sys.stdin.isatty() else typer.prompt(name, hide_input=True)
    if not value:
        raise CliError("The secret is empty; give it on standard input.")
    if _is_remote(remote, site, store):
        from pilotlight.functions.cli.deploy import put_secret

        return put_secret(Api(url), function, name, value)
    state, function = State(site, directory), _owner(function, store)
    state.secrets(lambda kept: kept.put(function, name, value))
    print(f"{function}: {name} is stored at this site; if the site runs, the function gets it in a few seconds")


@secret.command("list")
def secret_list(
    function: FunctionArgument,
    site: SiteOption = None,
    directory: DirOption = HERE,
    store: StoreOption = False,
    remote: RemoteOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """List the names of secrets, never their values."""
    if _is_remote(remote, site, store):
        from pilotlight.functions.cli.deploy import secret_names

        for name in secret_names(Api(url), function):
            print(name)
        return
    for name in State(site, directory).secrets(lambda kept: kept.names(_owner(function, store))):
        print(name)


@secret.command("delete")
def secret_delete(
    function: FunctionArgument,
    name: str,
    site: SiteOption = None,
    directory: DirOption = HERE,
    store: StoreOption = False,
    remote: RemoteOption = False,
    url: UrlOption = DEFAULT_URL,
) -> None:
    """Delete a secret."""
    if _is_remote(remote, site, store):
        from pilotlight.functions.cli.deploy import delete_secret

        return delete_secret(Api(url), function, name)
    function = _owner(function, store)
    if not State(site, directory).secrets(lambda kept: kept.delete(function, name)):
        raise CliError(f"{function} has no secret {name}.")


def _is_remote(remote: bool, site: Path | None, store: bool) -> bool:
    if remote and (site is not None or store):
        raise CliError("--remote works through the router; --site and --store work on this machine.")
    return remote


def _owner(function: str, is_store: bool) -> str:
    from pilotlight.functions.bindings.secrets.stored_secret import OWNER

    return f"{OWNER}{function}" if is_store else function


@secret.command("rotate-key")
def secret_rotate_key(site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Encrypt a site's secrets with a new key. If the site runs, it serves them meanwhile."""
    done = State(site, directory).secrets(lambda kept: list(kept.rotate_key()))
    print(f"{len(done)} functions and stores have their secrets encrypted with a new key")


@kv.command("get")
def kv_get(namespace: str, key: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Write a key's value to standard output."""
    answer = State(site, directory).bound("kv", namespace, lambda kv: kv.call("get", [key], {}))
    if not answer["found"]:
        raise CliError(f"{namespace} has no key {key!r}.")
    sys.stdout.buffer.write(answer["value"])
    sys.stdout.buffer.flush()


@kv.command("put")
def kv_put(
    namespace: str,
    key: str,
    value: Annotated[str | None, typer.Argument()] = None,
    path: Annotated[Path | None, typer.Option(help="Read the value from a file.")] = None,
    ttl: Annotated[int | None, typer.Option(help="Seconds until the key expires.")] = None,
    site: SiteOption = None,
    directory: DirOption = HERE,
) -> None:
    """Set a key."""
    if (value is None) == (path is None):
        raise CliError("Give either a value or --path.")
    data = contents(path) if path is not None else (value or "").encode()
    given = {"key": key, "value": data, "expiration_ttl": ttl}
    State(site, directory).bound("kv", namespace, lambda kv: kv.call("put", [], given), creates=True)


@kv.command("delete")
def kv_delete(namespace: str, key: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Remove a key."""
    State(site, directory).bound("kv", namespace, lambda kv: kv.call("delete", [key], {}))


@kv.command("list")
def kv_list(
    namespace: str,
    prefix: Annotated[str, typer.Option(help="Only keys that begin with this.")] = "",
    site: SiteOption = None,
    directory: DirOption = HERE,
) -> None:
    """List the names of all keys, one per line."""

    async def all_of(kv: "Binding") -> list[str]:
        return [key[0] async for page in pages(kv, prefix=prefix) for key in page["keys"]]

    for name in State(site, directory).bound("kv", namespace, all_of):
        print(name)


@queues.command("list")
def queues_list(site: SiteOption = None, directory: DirOption = HERE) -> None:
    """List all queues with their number of messages."""
    state = State(site, directory)
    folder = state.directory / "bindings" / "queue"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        print(f"{path.name}  {state.queue(path, 'depth')} messages")


@queues.command("purge")
def queues_purge(queue: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Delete all messages of a queue."""
    state = State(site, directory)
    name = str(state.declared("queue_producer", queue).options["queue"])
    has_data = state.has_data("queue_producer", name)
    print(f"{state.queue(state.folder('queue_producer', name), 'purge') if has_data else 0} messages deleted")


@queues.command("send")
def queues_send(queue: str, body: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Send a message; text that is not JSON is sent as a string."""
    try:
        value = json.loads(body)
    except ValueError:
        value = body
    message = {"messages": [{"body": value}]}
    State(site, directory).bound("queue_producer", queue, lambda bound: bound.call("send", [], message), creates=True)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows as a table, with their text as it is."""
    from rich.table import Table
    from rich.text import Text

    from pilotlight.runtime.cli.tables import print_table

    table = Table(box=None, header_style="bold")
    for column in columns:
        table.add_column(Text(column))
    for row in rows:
        table.add_row(*(Text("" if value is None else str(value)) for value in row))
    print_table(table)
