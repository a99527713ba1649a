"""`pilotlight d1`: run SQL on databases, apply migrations, restore earlier content.

A migration is an SQL file in the database's `migrations_dir`; a table of the database records the applied ones, as wrangler does.
"""

import json
import re
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from pilotlight.functions.cli.state import HERE, DirOption, SiteOption, State, contents, moment_of, print_rows
from pilotlight.runtime.cli.cli_error import CliError

if TYPE_CHECKING:
    from pilotlight.functions.bindings.binding import Binding
    from pilotlight.functions.bindings.storage.d1 import D1Database

LocalOption = Annotated[bool, typer.Option("--local", help="Use the state of `pilotlight dev` (the default).")]
RemoteOption = Annotated[bool, typer.Option("--remote", help="Use a site's state; name its file with --site.")]

d1 = typer.Typer(help="Run SQL on a D1 database, named by its binding, database_name or id.", no_args_is_help=True)
migrations = typer.Typer(help="Migrations of a database, each applied once.", no_args_is_help=True)
d1.add_typer(migrations, name="migrations")
time_travel = typer.Typer(help="Restore a database to a moment of the last days.", no_args_is_help=True)
d1.add_typer(time_travel, name="time-travel")

TimestampOption = Annotated[
    str | None,
    typer.Option(
        "--timestamp", help="An age (10m, 2h, 7d), seconds since 1970, or a time such as 2026-11-28T18:00:00Z."
    ),
]


@d1.command("execute")
def d1_execute(
    database: str,
    command: Annotated[str | None, typer.Option("--command", help="SQL.")] = None,
    file: Annotated[Path | None, typer.Option("--file", help="A file of SQL.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    site: SiteOption = None,
    directory: DirOption = HERE,
    local: LocalOption = False,
    remote: RemoteOption = False,
) -> None:
    """Run a statement and print its rows, or run a script."""
    if (command is None) == (file is None):
        raise CliError("Give either --command or --file.")
    sql = sql_in(file) if file is not None else command or ""

    async def work(d1: "Binding") -> Any:
        from pilotlight.functions.bindings.binding import BindingError
        from pilotlight.functions.bindings.storage.d1 import Statement
        from pilotlight.functions.bindings.storage.sql import statements_of

        if file is not None and len(statements := statements_of(sql)) > 1:
            return {"count": len(await _d1(d1).transaction(map(Statement, statements)))}
        try:
            return await d1.call("query", [], {"statement": {"sql": sql}})
        except BindingError as error:
            if "more than one statement" not in error.message:
                raise
            return await d1.call("exec", [sql], {})

    check_place(site, local, remote)
    answer = State(site, directory).bound("d1", database, work, creates=True)
    if "rows" not in answer:
        print(json.dumps({"count": answer["count"]}) if as_json else f"{answer['count']} statements")
    elif as_json:
        rows = [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]
        print(json.dumps(rows, default=lambda value: list(value)))
    elif answer["rows"]:
        print_rows(answer["columns"], answer["rows"])
    else:
        print(f"{answer['meta']['changes']} rows changed")


@migrations.command("create")
def migrations_create(database: str, message: str, directory: DirOption = HERE) -> None:
    """Create an empty file for the next migration."""
    folder = _Migrations(database, None, directory).folder
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(found[1]) for path in folder.glob("*.sql") if (found := re.match(r"(\d+)_", path.name))]
    path = folder / f"{max(numbers, default=0) + 1:04}_{re.sub(r'[^A-Za-z0-9]+', '_', message).strip('_')}.sql"
    path.write_text(f"-- Migration: {message}\n")
    print(path)


@migrations.command("list")
def migrations_list(
    database: str,
    site: SiteOption = None,
    directory: DirOption = HERE,
    local: LocalOption = False,
    remote: RemoteOption = False,
) -> None:
    """List the migrations that are not applied yet."""
    check_place(site, local, remote)
    if not (waiting := _Migrations(database, site, directory).open()):
        print("No migrations to apply")
    for path in waiting:
        print(path.name)


@migrations.command("apply")
def migrations_apply(
    database: str,
    site: SiteOption = None,
    directory: DirOption = HERE,
    local: LocalOption = False,
    remote: RemoteOption = False,
) -> None:
    """Apply the missing migrations in the order of their numbers, each in one transaction."""
    check_place(site, local, remote)
    known = _Migrations(database, site, directory)
    if not (waiting := known.open(creates=True)):
        print("No migrations to apply")
    for path in waiting:
        known.apply(path)
        print(f"{path.name}  applied")


@time_travel.command("info")
def time_travel_info(
    database: str,
    timestamp: TimestampOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    site: SiteOption = None,
    directory: DirOption = HERE,
    local: LocalOption = False,
    remote: RemoteOption = False,
) -> None:
    """Print the bookmark of a moment (default: now)."""
    check_place(site, local, remote)

    async def work(d1: "Binding") -> tuple[str, float | None]:
        history, first = _d1(d1).history, _d1(d1).history.first()
        at_s = None if timestamp is None else moment_of(timestamp)
        found = history.now() if at_s is None else history.at(at_s).bookmark
        return str(found), None if first is None else first.at_s

    bookmark, first_s = _with_history(State(site, directory), database, work)
    if as_json:
        print(json.dumps({"bookmark": bookmark, "history_begins": first_s}))
    else:
        command = f"pilotlight d1 time-travel restore {database}{_place(site, directory)} --bookmark {bookmark}"
        print(f"The bookmark is {bookmark}. To restore it: {command}")


@time_travel.command("restore")
def time_travel_restore(
    database: str,
    timestamp: TimestampOption = None,
    bookmark: Annotated[
        str | None, typer.Option("--bookmark", help="A bookmark that `info` or `restore` printed.")
    ] = None,
    site: SiteOption = None,
    directory: DirOption = HERE,
    local: LocalOption = False,
    remote: RemoteOption = False,
) -> None:
    """Restore a database to an earlier moment, even while its site runs. A restore can be undone."""
    from pilotlight.functions.bindings.storage.wal_archive import Bookmark

    if (timestamp is None) == (bookmark is None):
        raise CliError("Give either --timestamp or --bookmark.")
    check_place(site, local, remote)

    async def work(d1: "Binding") -> tuple[str, str]:
        found = Bookmark.parse(bookmark) if bookmark else _d1(d1).history.at(moment_of(timestamp or "")).bookmark
        return str(found), str(await _d1(d1).restore(found))

    restored, before = _with_history(State(site, directory), database, work)
    command = f"pilotlight d1 time-travel restore {database}{_place(site, directory)} --bookmark {before}"
    print(f"{database} is restored to {restored}. To undo this: {command}")


def _with_history(state: State, database: str, work: "Callable[[Binding], Awaitable[Any]]") -> Any:
    from pilotlight.functions.bindings.storage.wal_archive import HistoryError

    state.file_of("d1", database, "database.sqlite")  # fail before a misspelt name creates a database
    try:
        return state.bound("d1", database, work)
    except HistoryError as error:
        raise CliError(f"{database}: {error}.") from None


def migration_notes(databases: Iterable[str], directory: Path) -> Iterator[str]:
    """Yield a line for each database of `pilotlight dev` that lacks migrations. Raises CliError."""
    for database in databases:
        known = _Migrations(database, None, directory)
        if known.folder.is_dir() and (waiting := known.open()):
            names = ", ".join(path.name for path in waiting)
            yield f"{database}: not applied yet: {names}; pilotlight d1 migrations apply {database}{_place(None, directory)}"


def _place(site: Path | None, directory: Path) -> str:
    """Return the options of a command that works on the same state as this one."""
    given = {"--site": site, "--dir": None if directory == HERE else directory}
    return "".join(f" {option} {shlex.quote(str(path))}" for option, path in given.items() if path is not None)


class _Migrations:
    def __init__(self, database: str, site: Path | None, directory: Path) -> None:
        from pilotlight.functions.bindings.binding import BindingError
        from pilotlight.functions.bindings.storage.d1_migrations import MigrationFiles

        self._state = State(site, directory)
        self._database = database
        try:
            self._files = MigrationFiles.of(self._state.declared("d1", database).options, directory)
        except BindingError as error:
            raise CliError(error.message) from None
        self.folder = self._files.folder

    def open(self, *, creates: bool = False) -> list[Path]:
        """List the migrations that are not applied yet.
        A database that does not exist is made only with `creates`. Raises CliError."""
        if not self.folder.is_dir():
            raise CliError(
                f"There are no migrations in {self.folder}; create one with `pilotlight d1 migrations create`."
            )
        if not creates and not self._state.has_data("d1", self._database):
            return self._files.all()
        found: list[Path] = self._state.bound(
            "d1", self._database, lambda d1: self._files.waiting(_d1(d1)), creates=True
        )
        return found

    def apply(self, path: Path) -> None:
        if re.search(r"(?im)^\s*PRAGMA\s+foreign_keys\s*=", sql_in(path)):
            print(
                f"{path.name}: PRAGMA foreign_keys has no effect, as on D1: dropping a table also deletes rows that reference it by CASCADE; "
                "defer_foreign_keys only postpones the checks",
                file=sys.stderr,
            )
        try:
            self._state.bound("d1", self._database, lambda d1: self._files.apply(_d1(d1), [path]), creates=True)
        except CliError as error:
            raise CliError(f"{path.name} was not applied: {error}") from None


def _d1(binding: "Binding") -> "D1Database":
    return cast("D1Database", binding)


def sql_in(path: Path) -> str:
    """Return a file's text. Raises CliError."""
    try:
        return contents(path).decode()
    except UnicodeDecodeError:
        raise CliError(f"{path} is not UTF-8 text.") from None


def check_place(site: Path | None, local: bool, remote: bool) -> None:
    """Check the options --local and --remote, which wrangler has. Raises CliError."""
    if remote and site is None:
        raise CliError("--remote needs --site with the site's file, and must run on that site's machine.")
    if local and site is not None:
        raise CliError("--local and --site name two different places.")
