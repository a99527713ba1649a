"""Operators' view of stores: pages of rows and keys, hostile schemas, and functions that write at the same time."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.bindings.storage.kv import SCHEMA
from pilotlight.functions.bindings.storage.store_view import (
    FILES,
    KV_COLUMNS,
    MAX_CELL,
    NoStoreError,
    StoreReadError,
    list_stores,
    read_page,
)
from pilotlight.wire.hop.management import StoreKind, StoreQuery

Make = Callable[..., sqlite3.Connection]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that creates a store and returns a connection to it, like a function's."""

    def make(kind: StoreKind, name: str, script: str = "", owner: str = "f") -> sqlite3.Connection:
        folder = tmp_path / "bindings" / kind / name
        folder.mkdir(parents=True)
        (folder / "owner").write_text(owner)
        connection = sqlite3.connect(folder / FILES[kind], isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(script or SCHEMA)
        return connection

    return make


def page(state_dir: Path, kind: StoreKind, name: str, **fields: Any) -> Any:
    return read_page(state_dir, StoreQuery(kind, name, **fields))


def test_stores_are_listed_with_their_owners_and_sizes(make: Make, tmp_path: Path) -> None:
    assert list_stores(tmp_path) == ()
    make("kv", "notes")
    make("d1", "shop", "CREATE TABLE t (a)", owner="@site")
    assert [(one.kind, one.name, one.owner, one.bytes > 0) for one in list_stores(tmp_path)] == [
        ("d1", "shop", "@site", True), ("kv", "notes", "f", True),
    ]  # fmt: skip


def test_a_table_is_read_page_by_page_while_a_function_writes(make: Make, tmp_path: Path) -> None:
    function = make("d1", "shop", "CREATE TABLE goods (name TEXT, price, picture BLOB); CREATE TABLE a_first (x)")
    for i in range(5):
        function.execute("INSERT INTO goods VALUES (?, ?, ?)", (f"thing {i}", None if i == 1 else 2**60 + i, b"12345"))
    function.execute("BEGIN IMMEDIATE")
    function.execute("DELETE FROM goods")
    assert page(tmp_path, "d1", "shop").table == "a_first"
    first = page(tmp_path, "d1", "shop", table="goods", limit=2)
    assert (first.tables, first.columns) == (("a_first", "goods"), ("name", "price", "picture"))
    assert first.rows == (("thing 0", str(2**60), "5 bytes"), ("thing 1", None, "5 bytes"))
    second = page(tmp_path, "d1", "shop", table="goods", limit=2, after=first.next)
    last = page(tmp_path, "d1", "shop", table="goods", limit=2, after=second.next)
    assert ([row[0] for row in last.rows], last.next) == (["thing 4"], "")
    assert page(tmp_path, "d1", "shop", table="goods", after="9" * 512).rows == ()
    function.execute("ROLLBACK")


def test_keys_are_read_in_order_by_prefix_and_without_the_expired(make: Make, tmp_path: Path) -> None:
    function = make("kv", "notes")
    put = "INSERT INTO entries (key, expires_s, metadata, value) VALUES (?, ?, ?, ?)"
    for key, expires_s, metadata, value in (
        ("a/1", None, '{"by": "me"}', b"one"), ("a/2", 4e9, None, "zwei ü".encode()), ("a/3", 1, None, b"gone"),
        ("a/4", None, None, b"\0\xff"), ("b/1", None, None, b"other"),
    ):  # fmt: skip
        function.execute(put, (key.encode(), expires_s, metadata, value))
    first = page(tmp_path, "kv", "notes", prefix="a/", limit=2)
    assert first.columns == KV_COLUMNS
    assert first.rows == (("a/1", "one", '{"by": "me"}', None), ("a/2", "zwei ü", None, "4000000000"))
    rest = page(tmp_path, "kv", "notes", prefix="a/", limit=2, after=first.next)
    assert (rest.rows, rest.next) == ((("a/4", "2 bytes", None, None),), "")


def test_long_values_are_cut(make: Make, tmp_path: Path) -> None:
    make("d1", "shop", "CREATE TABLE t (x TEXT)").execute("INSERT INTO t VALUES (?)", ("ü" * 100_000,))
    make("kv", "notes").execute("INSERT INTO entries VALUES (?, NULL, NULL, ?)", (b"k", b"y" * 100_000))
    assert page(tmp_path, "d1", "shop").rows == (("ü" * MAX_CELL + "…",),)
    assert page(tmp_path, "kv", "notes").rows[0][1] == "y" * MAX_CELL + "…"


def test_names_of_a_hostile_schema_are_only_names(make: Make, tmp_path: Path) -> None:
    bad = 'x"; DROP TABLE goods; --'
    quoted = bad.replace('"', '""')
    function = make(
        "d1",
        "shop",
        f'CREATE TABLE "{quoted}" ("{quoted}", "a\'b"); CREATE TABLE goods (y); CREATE TABLE _cf_own (z);'
        "CREATE VIEW endless AS WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n FROM c",
    )
    function.execute(f'INSERT INTO "{quoted}" VALUES (1, 2)')
    found = page(tmp_path, "d1", "shop", table=bad)
    assert (found.tables, found.columns, found.rows) == (("goods", bad), (bad, "a'b"), (("1", "2"),))
    for name in ("endless", "_cf_own", "sqlite_schema"):
        with pytest.raises(NoStoreError, match="has no table named"):
            page(tmp_path, "d1", "shop", table=name)
    assert page(tmp_path, "d1", "shop", table="goods").rows == ()


def test_a_page_that_takes_too_long_ends(make: Make, tmp_path: Path) -> None:
    slow = make("d1", "shop", "CREATE TABLE t (x)")
    with slow:
        slow.execute("BEGIN")
        slow.executemany("INSERT INTO t VALUES (?)", [(i,) for i in range(10_000)])
    with pytest.raises(StoreReadError, match="was not read within 0 s"):
        read_page(tmp_path, StoreQuery("d1", "shop", after="9999"), time_limit_s=0.0)


@pytest.mark.parametrize("name", ["..", ".", "../kv/notes", "nothing", "a\0b", "/etc"])
def test_a_name_leads_to_no_other_file(make: Make, tmp_path: Path, name: str) -> None:
    make("kv", "notes")
    with pytest.raises(NoStoreError, match="has no d1 store"):
        page(tmp_path, "d1", name)


def test_a_file_that_is_no_database_is_an_error(make: Make, tmp_path: Path) -> None:
    make("d1", "shop", "CREATE TABLE t (x)").close()
    (tmp_path / "bindings/d1/shop/database.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(StoreReadError, match="shop cannot be read"):
        page(tmp_path, "d1", "shop")
