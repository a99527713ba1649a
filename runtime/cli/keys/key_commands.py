"""`pilotlight keys`: names, options and help; the work is in key_files.py, imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

keys = typer.Typer(help="API keys of clients.", no_args_is_help=True)
KeyName = Annotated[str, typer.Argument(help="Name of the key, shown in usage and logs.")]
KeysFileOption = Annotated[
    Path, typer.Option(help="File with the key: a router's or site's file, or one for `serve --keys`.")
]


@keys.command("create")
def create_key(
    name: KeyName,
    file: Annotated[
        Path | None, typer.Option(help="File for the key: a router's or site's file, or one for `serve --keys`.")
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="Scope: models (the default), deploy, metrics or admin. Repeatable."),
    ] = None,
    account: Annotated[
        str | None, typer.Option(help="Account of the key; by default one with the key's own name.")
    ] = None,
    expires_days: Annotated[
        float | None, typer.Option(min=0.0, help="Days until the key expires; by default it does not.")
    ] = None,
) -> None:
    """Make a key, show it once, and keep its digest."""
    from pilotlight.runtime.cli.keys.key_files import create as run
    from pilotlight.sites.key_files import NewKey

    run(NewKey(name, tuple(scope or ("models",)), account, expires_days), file)


@keys.command("list")
def list_keys(
    file: KeysFileOption, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List a file's keys: account, scopes and expiry."""
    from pilotlight.runtime.cli.keys.key_files import list_keys as run

    run(file, as_json)


@keys.command("revoke")
def revoke_key(name: KeyName, file: KeysFileOption) -> None:
    """Revoke a key. Servers refuse it from their next SIGHUP on."""
    from pilotlight.runtime.cli.keys.key_files import revoke as run

    run(file, name)


@keys.command("rotate")
def rotate_key(
    name: KeyName,
    file: KeysFileOption,
    grace_hours: Annotated[float, typer.Option(min=0.0, help="Hours for which the previous key stays valid.")] = 24.0,
) -> None:
    """Replace a key by a new one; the previous key stays valid for a while."""
    from pilotlight.runtime.cli.keys.key_files import rotate as run

    run(file, name, grace_hours)
