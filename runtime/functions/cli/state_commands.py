"""The names, options and help of `pilotlight secret`, `kv`, `d1` and `queues`; runtime/functions/cli/state.py does their work."""

from pathlib import Path
from typing import Annotated

import typer

SiteOption = Annotated[Path | None, typer.Option("--site", help="A site's file, on the machine of that site.")]
DirOption = Annotated[Path, typer.Option("--dir", help="The folder of a function that `pilotlight dev` serves.")]
HERE = Path(".")

secret = typer.Typer(help="Secrets of functions, sealed on this machine.", no_args_is_help=True)
kv = typer.Typer(help="Keys of a KV namespace, by its binding's name or its id.", no_args_is_help=True)
d1 = typer.Typer(help="SQL on a D1 database, by its binding's name or its id.", no_args_is_help=True)
queues = typer.Typer(help="Messages that wait in queues.", no_args_is_help=True)


@secret.command("put")
def secret_put(function: str, name: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Keep a secret; its value is read from standard input."""
    from runtime.functions.cli.state import State, put_secret

    put_secret(State(site, directory), function, name)


@secret.command("list")
def secret_list(function: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Names, never values."""
    from runtime.functions.cli.state import State, list_secrets

    list_secrets(State(site, directory), function)


@secret.command("delete")
def secret_delete(function: str, name: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Forget a secret."""
    from runtime.functions.cli.state import State, delete_secret

    delete_secret(State(site, directory), function, name)


@kv.command("get")
def kv_get(namespace: str, key: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Write a key's value to standard output."""
    from runtime.functions.cli.state import State, get_key

    get_key(State(site, directory), namespace, key)


@kv.command("put")
def kv_put(
    namespace: str,
    key: str,
    value: Annotated[str | None, typer.Argument()] = None,
    path: Annotated[Path | None, typer.Option(help="Take the value from a file.")] = None,
    ttl: Annotated[int | None, typer.Option(help="Seconds until it is gone.")] = None,
    site: SiteOption = None,
    directory: DirOption = HERE,
) -> None:
    """Set a key."""
    from runtime.cli.errors import CliError
    from runtime.functions.cli.state import State, put_key

    if (value is None) == (path is None):
        raise CliError("Give either a value or --path.")
    data = path.read_bytes() if path is not None else (value or "").encode()
    put_key(State(site, directory), namespace, key, data, ttl)


@kv.command("delete")
def kv_delete(namespace: str, key: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Remove a key."""
    from runtime.functions.cli.state import State, delete_key

    delete_key(State(site, directory), namespace, key)


@kv.command("list")
def kv_list(namespace: str, prefix: str = "", site: SiteOption = None, directory: DirOption = HERE) -> None:
    """The names of all keys, one a line."""
    from runtime.functions.cli.state import State, list_keys

    list_keys(State(site, directory), namespace, prefix)


@d1.command("execute")
def d1_execute(
    database: str,
    command: Annotated[str | None, typer.Option("--command", help="SQL.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file of SQL.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    site: SiteOption = None,
    directory: DirOption = HERE,
) -> None:
    """Run a statement and print its rows, or run a script."""
    from runtime.cli.errors import CliError
    from runtime.functions.cli.state import State, execute

    if (command is None) == (file is None):
        raise CliError("Give either --command or --file.")
    execute(State(site, directory), database, file.read_text() if file is not None else command or "", as_json)


@queues.command("list")
def queues_list(site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Every queue, and how many messages wait in it."""
    from runtime.functions.cli.state import State, list_queues

    list_queues(State(site, directory))


@queues.command("purge")
def queues_purge(queue: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Forget all messages of a queue."""
    from runtime.functions.cli.state import State, purge_queue

    purge_queue(State(site, directory), queue)


@queues.command("send")
def queues_send(queue: str, body: str, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Send a message: JSON, or else text."""
    from runtime.functions.cli.state import State, send_message

    send_message(State(site, directory), queue, body)
