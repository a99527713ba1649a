"""`pilotlight d1`, `kv` and `r2` with `export` or `import`: a whole store as files.

D1 uses an SQL script, as wrangler's `d1 export` does; KV uses the JSON of wrangler's `kv bulk put`; R2 uses a folder with a file per object, and an
index with a line of JSON per object.
"""

import base64
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotlight.functions.cli.d1_commands import LocalOption, RemoteOption, check_place, d1, d1_execute
from pilotlight.functions.cli.state import HERE, DirOption, SiteOption, State, contents, kv, pages
from pilotlight.runtime.cli.cli_error import CliError

if TYPE_CHECKING:
    from pilotlight.functions.bindings.binding import Binding

OutputOption = Annotated[Path, typer.Option("--output", help="The file to write.")]
INDEX = ".objects.jsonl"  # index of an exported bucket
ODD = ".objects"  # folder of objects whose keys cannot be paths

r2 = typer.Typer(help="Objects of an R2 bucket, by its binding's name or its bucket_name.", no_args_is_help=True)


@d1.command("export")
def d1_export(
    database: str,
    output: OutputOption,
    table: Annotated[list[str] | None, typer.Option("--table", help="Export only this table; may be repeated.")] = None,
    no_schema: Annotated[bool, typer.Option("--no-schema", help="Rows only.")] = False,
    no_data: Annotated[bool, typer.Option("--no-data", help="Tables only.")] = False,
    site: SiteOption = None,
    directory: DirOption = HERE,
    local: LocalOption = False,
    remote: RemoteOption = False,
) -> None:
    """Write a database as SQL. The snapshot is consistent even while the function runs."""
    check_place(site, local, remote)
    path = State(site, directory).file_of("d1", database, "database.sqlite")
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        connection.execute("BEGIN")  # a consistent snapshot
        lines = _dumped(connection, frozenset(table or ()), has_schema=not no_schema, has_data=not no_data)
        lines = chain([next(lines)], lines)  # checks the tables before an earlier export is overwritten
        with output.open("w", encoding="utf-8") as file:
            num_lines = sum(file.write(f"{line}\n") > 0 for line in lines)
    print(f"{output}: {num_lines} statements")


@d1.command("import")
def d1_import(
    database: str,
    file: Annotated[Path, typer.Argument(help="SQL, as `d1 export` writes it.")],
    site: SiteOption = None,
    directory: DirOption = HERE,
    local: LocalOption = False,
    remote: RemoteOption = False,
) -> None:
    """Run an SQL file of any size in one transaction, like `d1 execute --file`."""
    d1_execute(database, file=file, site=site, directory=directory, local=local, remote=remote)


def _dumped(
    connection: sqlite3.Connection, tables: frozenset[str], *, has_schema: bool, has_data: bool
) -> Iterator[str]:
    """Yield the SQL statements that recreate the database. Raises CliError."""
    made = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    made = [row for row in made if not row[1].startswith(("sqlite_", "_cf_"))]
    if virtual := [name for kind, name, _, sql in made if kind == "table" and sql.upper().startswith("CREATE VIRTUAL")]:
        raise CliError(f"The table {virtual[0]} is virtual and has no rows: export the others by --table.")
    wanted = [row for row in made if not tables or row[2] in tables]
    if missing := tables - {row[2] for row in wanted}:
        raise CliError(f"The database has no table {sorted(missing)[0]}.")
    yield "PRAGMA defer_foreign_keys = TRUE;"
    names = [name for kind, name, _, _ in wanted if kind == "table"]
    if has_schema:
        yield from (f"{sql};" for kind, _, _, sql in wanted if kind == "table")
    for name in names if has_data else ():
        yield from _rows(connection, name)
    counted = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_sequence'").fetchone()
    if has_schema:
        yield from (f"{sql};" for kind, _, _, sql in wanted if kind != "table")
    if has_data and counted is not None and not tables:
        for name, last in connection.execute("SELECT name, seq FROM sqlite_sequence").fetchall():
            if name in names:
                yield f"UPDATE sqlite_sequence SET seq = {int(last)} WHERE name = {_quoted(name, chr(39))};"


def _rows(connection: sqlite3.Connection, table: str) -> Iterator[str]:
    name = _quoted(table, '"')
    # columns that are not generated
    columns = [row[1] for row in connection.execute(f"PRAGMA table_xinfo({name})") if row[6] == 0]
    literals = " || ',' || ".join(_literal(_quoted(column, '"')) for column in columns)
    into = ", ".join(_quoted(column, '"') for column in columns)
    for (values,) in connection.execute(f"SELECT {literals} FROM {name}"):
        yield f"INSERT INTO {name} ({into}) VALUES ({values});"


def _literal(column: str) -> str:
    """Return an SQL expression for the literal of a column's value.
    SQLite's quote() cuts texts off at NUL, and writes infinity as a name."""
    with_nul = f"'CAST(' || quote(CAST({column} AS BLOB)) || ' AS TEXT)'"
    return (
        f"CASE WHEN typeof({column}) = 'text' AND instr({column}, char(0)) THEN {with_nul} "
        f"WHEN typeof({column}) = 'real' AND abs({column}) = 9e999 THEN iif({column} > 0, '9e999', '-9e999') "
        f"ELSE quote({column}) END"
    )


def _quoted(text: str, mark: str) -> str:
    return mark + text.replace(mark, mark * 2) + mark


@kv.command("export")
def kv_export(namespace: str, output: OutputOption, site: SiteOption = None, directory: DirOption = HERE) -> None:
    """Write all keys with values, metadata and expirations, in the format of `wrangler kv bulk put`."""

    async def work(kv: "Binding") -> int:
        count = 0
        with output.open("w", encoding="utf-8") as file:
            file.write("[")
            async for page in pages(kv):
                for name, expires_s, metadata in page["keys"]:
                    found = await kv.call("get", [name], {})
                    if found["found"]:  # the key may have been deleted meanwhile
                        entry = json.dumps(_entry(name, found["value"], expires_s, metadata))
                        file.write(f",\n{entry}" if count else f"\n{entry}")
                        count += 1
            file.write("\n]\n")
        return count

    print(f"{output}: {State(site, directory).bound('kv', namespace, work)} keys")


def _entry(name: str, value: bytes, expires_s: int | None, metadata: str | None) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = {"key": name, "value": value.decode()}
    except UnicodeDecodeError:
        entry = {"key": name, "value": base64.b64encode(value).decode(), "base64": True}
    if expires_s is not None:
        entry["expiration"] = expires_s
    if metadata is not None:
        entry["metadata"] = json.loads(metadata)
    return entry


@kv.command("import")
def kv_import(
    namespace: str,
    file: Annotated[Path, typer.Argument(help="JSON, as `kv export` writes it.")],
    site: SiteOption = None,
    directory: DirOption = HERE,
) -> None:
    """Set all keys of a file, except expired ones."""
    try:
        entries = json.loads(contents(file))
        puts = [_put_of(entry) for entry in entries]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CliError(f"{file} is not a list of keys with values: {error!r}.") from None

    async def work(kv: "Binding") -> int:
        live = [put for put in puts if put["expiration"] is None or put["expiration"] > time.time() + 60]
        for put in live:
            await kv.call("put", [], put)
        return len(live)

    print(f"{State(site, directory).bound('kv', namespace, work, creates=True)} keys were set")


def _put_of(entry: dict[str, Any]) -> dict[str, Any]:
    value = base64.b64decode(entry["value"], validate=True) if entry.get("base64") else entry["value"].encode()
    metadata = json.dumps(entry["metadata"]) if entry.get("metadata") is not None else None
    times = {name: entry.get(name) for name in ("expiration", "expiration_ttl")}
    if not all(isinstance(seconds, int | None) for seconds in times.values()):
        raise TypeError(f"the times of {entry['key']} must be whole seconds")
    return {"key": entry["key"], "value": value, "metadata": metadata, **times}


@r2.command("export")
def r2_export(
    bucket: str,
    output: Annotated[Path, typer.Option("--output", help="The folder to make.")],
    prefix: Annotated[str, typer.Option(help="Export only keys with this prefix.")] = "",
    site: SiteOption = None,
    directory: DirOption = HERE,
) -> None:
    """Write all objects to files in a folder, named by their keys.
    An object whose key is not a valid path goes below `.objects`. `.objects.jsonl` lists all objects."""
    if output.exists() and any(output.iterdir()):
        raise CliError(f"{output} is not empty.")

    async def work(bucket: "Binding") -> int:
        output.mkdir(parents=True, exist_ok=True)
        count = 0
        with (output / INDEX).open("w", encoding="utf-8") as index:
            async for page in pages(bucket, prefix=prefix):
                for listed in page["objects"]:
                    got = await bucket.call("get", [], {"key": listed["key"]})
                    if got is None:  # the object was deleted meanwhile
                        continue
                    count += 1
                    path = _place(output, listed["key"], count)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("wb") as file:
                        async for chunk in got.body:
                            file.write(chunk)
                    told = got.value["object"]
                    kept = {
                        name: told[name]
                        for name in ("key", "etag", "size", "http_metadata", "custom_metadata", "storage_class")
                    }
                    index.write(json.dumps({**kept, "file": path.relative_to(output).as_posix()}) + "\n")
        return count

    print(f"{output}: {State(site, directory).bound('r2', bucket, work)} objects")


def _place(output: Path, key: str, number: int) -> Path:
    """Return the file for an object: its key as a path, or a number if that path is invalid or taken."""
    parts = key.split("/")
    is_path = all(part and not part.startswith(".") and "\0" not in part and len(part.encode()) < 256 for part in parts)
    path = output / PurePosixPath(key) if is_path else output / ODD / str(number)
    is_free = not path.exists() and not any(parent.is_file() for parent in path.parents)
    return path if is_free else output / ODD / str(number)


@r2.command("import")
def r2_import(
    bucket: str,
    folder: Annotated[Path, typer.Argument(help="A folder that `r2 export` wrote.")],
    site: SiteOption = None,
    directory: DirOption = HERE,
) -> None:
    """Store all objects of an exported folder, with their metadata."""
    if not (folder / INDEX).is_file():
        raise CliError(f"{folder} has no {INDEX}: it is not an exported bucket.")

    async def pieces(path: Path) -> Any:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                yield chunk

    async def work(bucket: "Binding") -> int:
        count = 0
        with (folder / INDEX).open(encoding="utf-8") as index:
            for line in index:
                try:
                    told = json.loads(line)
                    details = {name: told[name] for name in ("http_metadata", "custom_metadata", "storage_class")}
                    put, path = {"key": told["key"], "details": details}, folder / told["file"]
                except (ValueError, TypeError, KeyError) as error:
                    raise CliError(f"{folder / INDEX}, line {count + 1}, is no object: {error!r}.") from None
                await bucket.call("put", [], put, pieces(path))
                count += 1
        return count

    print(f"{State(site, directory).bound('r2', bucket, work, creates=True)} objects were put")
