"""`pilotlight secret`, `kv`, `d1` and `queues`: what bindings keep on this machine, read and changed without the function.

Works on the state directory of a site's file, or of the folder that `pilotlight dev` serves. The bindings' own code does the work, so what they
refuse is refused here, and a running site sees the change.
"""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runtime.cli.errors import CliError
from runtime.functions.bindings.binding import Binding, BindingError, Services
from runtime.functions.bindings.queues import Queue
from runtime.functions.bindings.registry import open_binding
from runtime.functions.bindings.secret_store import SecretError, SecretStore
from runtime.functions.manifest import FILES, BindingDeclaration, Manifest, load_manifest
from runtime.functions.service import state_dir_of
from sites.site import load_site

DEV_STATE = ".pilotlight"


class State:
    """Where it lies, and the manifest by whose names it may be called."""

    def __init__(self, site: Path | None, directory: Path) -> None:
        self.directory = state_dir_of(load_site(site)) if site is not None else directory / DEV_STATE
        has_manifest = any((directory / name).is_file() for name in FILES)
        self._manifest: Manifest | None = load_manifest(directory) if has_manifest else None
        if site is None and self._manifest is None:
            raise CliError(
                f"{directory} has no manifest: name a function's folder with --dir, or a site's file with --site."
            )

    def declared(self, kind: str, name: str) -> BindingDeclaration:
        """By the binding's name in the manifest, or by its id."""
        for declaration in self._manifest.bindings if self._manifest is not None else ():
            if declaration.kind == kind and declaration.name == name:
                return declaration
        return BindingDeclaration(kind, name, {"id": name, "database_id": name, "queue": name})

    def queue(self, name: str) -> str:
        return str(self.declared("queue_producer", name).options["queue"])


def put_secret(state: State, function: str, name: str) -> None:
    value = sys.stdin.read().rstrip("\n") if not sys.stdin.isatty() else _asked(name)
    if not value:
        raise CliError("The secret is empty; give it on standard input.")
    _secrets(lambda: SecretStore(state.directory).put(function, name, value))
    print(f"{function}: {name} is kept; the function has it from its next start on")


def list_secrets(state: State, function: str) -> None:
    for name in _secrets(lambda: SecretStore(state.directory).names(function)):
        print(name)


def delete_secret(state: State, function: str, name: str) -> None:
    if not _secrets(lambda: SecretStore(state.directory).delete(function, name)):
        raise CliError(f"{function} has no secret {name}.")


def get_key(state: State, namespace: str, key: str) -> None:
    answer = _bound(state, "kv", namespace, lambda kv: kv.call("get", [key], {}))
    if not answer["found"]:
        raise CliError(f"{namespace} has no key {key!r}.")
    sys.stdout.buffer.write(answer["value"])
    sys.stdout.buffer.flush()


def put_key(state: State, namespace: str, key: str, value: bytes, ttl_s: int | None) -> None:
    _bound(state, "kv", namespace, lambda kv: kv.call("put", [], {"key": key, "value": value, "expiration_ttl": ttl_s}))


def delete_key(state: State, namespace: str, key: str) -> None:
    _bound(state, "kv", namespace, lambda kv: kv.call("delete", [key], {}))


def list_keys(state: State, namespace: str, prefix: str) -> None:
    async def all_of(kv: Binding) -> list[str]:
        names: list[str] = []
        cursor: str | None = None
        while True:
            page = await kv.call("list", [], {"prefix": prefix, "cursor": cursor})
            names += [key[0] for key in page["keys"]]
            if (cursor := page.get("cursor")) is None:
                return names

    for name in _bound(state, "kv", namespace, all_of):
        print(name)


def execute(state: State, database: str, sql: str, as_json: bool) -> None:
    """One statement with its rows, or a script."""

    async def work(d1: Binding) -> Any:
        try:
            return await d1.call("query", [], {"statement": {"sql": sql}})
        except BindingError as error:
            if "more than one statement" not in error.message:
                raise
            return await d1.call("exec", [sql], {})

    answer = _bound(state, "d1", database, work)
    if "rows" not in answer:
        print(f"{answer['count']} statements")
        return
    rows = [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]
    if as_json:
        print(json.dumps(rows, default=lambda value: list(value)))
    elif rows:
        table = Table(*answer["columns"], box=None, header_style="bold")
        for row in answer["rows"]:
            table.add_row(*("" if value is None else str(value) for value in row))
        Console().print(table)
    else:
        print(f"{answer['meta']['changes']} rows changed")


def list_queues(state: State) -> None:
    folder = state.directory / "bindings" / "queue"
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        print(f"{path.name}  {_queue(state, path.name, Queue.depth)} messages")


def purge_queue(state: State, name: str) -> None:
    print(f"{_queue(state, state.queue(name), Queue.purge)} messages are gone")


def send_message(state: State, name: str, body: str) -> None:
    try:
        value = json.loads(body)
    except ValueError:
        value = body
    _bound(state, "queue_producer", name, lambda queue: queue.call("send", [], {"messages": [{"body": value}]}))


def _bound(state: State, kind: str, name: str, work: Callable[[Binding], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        services = Services()
        try:
            return await work(open_binding(state.declared(kind, name), state.directory, services))
        finally:
            await services.databases.close()

    try:
        return asyncio.run(run())
    except BindingError as error:
        raise CliError(error.message) from None


def _queue(state: State, name: str, work: Callable[[Queue], Awaitable[int]]) -> int:
    async def run() -> int:
        services = Services()
        try:
            return await work(Queue.of(name, state.directory, services))
        finally:
            await services.databases.close()

    return asyncio.run(run())


def _secrets(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except SecretError as error:
        raise CliError(str(error)) from None


def _asked(name: str) -> str:
    import getpass

    return getpass.getpass(f"{name}: ")
