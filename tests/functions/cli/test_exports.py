"""Export and import of stores: the content comes back byte for byte, while other processes may write."""

import json
import shutil
from pathlib import Path

import pytest

from pilotlight.runtime.cli.cli_error import CliError
from tests.functions.cli.test_state import run

MANIFEST = """
name = "f"
main = "entry.py"
[[d1_databases]]
binding = "DB"
[[kv_namespaces]]
binding = "KV"
[[r2_buckets]]
binding = "FILES"
bucket_name = "files"
"""


def made(folder: Path) -> tuple[str, str]:
    folder.mkdir()
    (folder / "entry.py").write_text("")
    (folder / "wrangler.toml").write_text(MANIFEST)
    return ("--dir", str(folder))


@pytest.fixture
def here(tmp_path: Path) -> tuple[str, str]:
    return made(tmp_path / "f")


@pytest.fixture
def there(tmp_path: Path) -> tuple[str, str]:
    return made(tmp_path / "g")


SQL = """
CREATE TABLE parents (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL);
CREATE TABLE "odd "" name" (id INTEGER REFERENCES parents (id), data BLOB, half REAL, twice REAL AS (half * 2));
CREATE INDEX by_name ON parents (name);
CREATE VIEW names AS SELECT name FROM parents;
CREATE TRIGGER t AFTER INSERT ON parents BEGIN UPDATE parents SET name = name || '!' WHERE id = NEW.id; END;
INSERT INTO parents (name) VALUES ('O''Hara'), ('two
lines; and more');
DELETE FROM parents WHERE id = 2;
INSERT INTO "odd "" name" (id, data, half) VALUES (1, x'00ff', 0.1), (NULL, NULL, 1e300);
"""
READ = 'SELECT id, hex(data) AS data, half, twice FROM "odd "" name"'


def test_a_database_is_the_same_after_export_and_import(
    here: tuple[str, str], there: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "in.sql").write_text(SQL)
    run("d1", "import", "DB", str(tmp_path / "in.sql"), *here)
    out = tmp_path / "out.sql"
    assert "statements" in run("d1", "export", "DB", "--output", str(out), *here)
    run("d1", "import", "DB", str(out), *there)
    for query in (
        READ,
        "SELECT * FROM names",
        "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name",
    ):
        asked = ("d1", "execute", "DB", "--json", "--command", query)
        assert run(*asked, *there) == run(*asked, *here)
    added = "INSERT INTO parents (name) VALUES ('next') RETURNING id"
    (row,) = json.loads(run("d1", "execute", "DB", "--json", "--command", added, *there))
    assert row["id"] == 3, "ids of deleted rows are not reused"
    run("d1", "export", "DB", "--output", str(out), "--table", "parents", "--no-schema", *here)
    assert out.read_text().splitlines()[1:] == ['INSERT INTO "parents" ("id", "name") VALUES (1,\'O\'\'Hara!\');']
    run("d1", "export", "DB", "--output", str(out), "--no-data", *here)
    assert 'INSERT INTO "' not in out.read_text()


def test_every_value_is_the_same_after_export_and_import(
    here: tuple[str, str], there: tuple[str, str], tmp_path: Path
) -> None:
    values = [
        "CAST(x'610062' AS TEXT)", "CAST(x'00' AS TEXT)", "x'00'", "9e999", "-9e999", "'Inf'", "''", "NULL",
        "0.1 + 0.2", "-1 << 63",
    ]  # fmt: skip
    made = "CREATE TABLE any_type (v); CREATE TABLE texts (v TEXT); CREATE TABLE numbers (v REAL);"
    rows = "), (".join(values)
    (tmp_path / "in.sql").write_text(
        f"{made} INSERT INTO any_type VALUES ({rows}); INSERT INTO texts SELECT v FROM any_type; INSERT INTO numbers SELECT v FROM any_type;"
    )
    run("d1", "import", "DB", str(tmp_path / "in.sql"), *here)
    run("d1", "export", "DB", "--output", str(tmp_path / "out.sql"), *here)
    run("d1", "import", "DB", str(tmp_path / "out.sql"), *there)
    for table in ("any_type", "texts", "numbers"):
        query = f"SELECT typeof(v) AS kind, hex(v) AS bytes, v > 1e308 AS is_high, v < -1e308 AS is_low FROM {table}"
        asked = ("d1", "execute", "DB", "--json", "--command", query)
        assert run(*asked, *there) == run(*asked, *here)


def test_what_cannot_be_exported_is_named(here: tuple[str, str], tmp_path: Path) -> None:
    out = str(tmp_path / "out.sql")
    with pytest.raises(CliError, match="DB has no data here"):
        run("d1", "export", "DB", "--output", out, *here)
    run("d1", "execute", "DB", "--command", "CREATE VIRTUAL TABLE search USING fts5(text)", *here)
    with pytest.raises(CliError, match="search is virtual"):
        run("d1", "export", "DB", "--output", out, *here)
    run("d1", "execute", "DB", "--command", "DROP TABLE search", *here)
    (tmp_path / "out.sql").write_text("an earlier export")
    with pytest.raises(CliError, match="no table nowhere"):
        run("d1", "export", "DB", "--output", out, "--table", "nowhere", *here)
    assert (tmp_path / "out.sql").read_text() == "an earlier export"


def test_a_line_that_describes_no_object_is_named(here: tuple[str, str], tmp_path: Path) -> None:
    for line in ('{"key": "a"', '{"key": "a"}', "[]"):
        (tmp_path / ".objects.jsonl").write_text(f"{line}\n")
        with pytest.raises(CliError, match=r"\.objects\.jsonl, line 1, is no object"):
            run("r2", "import", "FILES", str(tmp_path), *here)


def test_keys_come_out_as_wrangler_reads_them_and_go_in_again(
    here: tuple[str, str], there: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\x00")
    run("kv", "put", "KV", "text", "välue", *here)
    run("kv", "put", "KV", "binary", "--path", str(tmp_path / "bytes"), "--ttl", "3600", *here)
    out = tmp_path / "out.json"
    assert "2 keys" in run("kv", "export", "KV", "--output", str(out), *here)
    binary, text = json.loads(out.read_text())
    assert text == {"key": "text", "value": "välue"}
    assert (binary["value"], binary["base64"], binary["expiration"] > 0) == ("/wA=", True, True)
    out.write_text(json.dumps([{**binary, "metadata": {"a": 1}}, {**text, "key": "old", "expiration": 1}]))
    assert run("kv", "import", "KV", str(out), *there) == "1 keys were set\n"
    run("kv", "export", "KV", "--output", str(out), *there)
    assert json.loads(out.read_text()) == [{**binary, "metadata": {"a": 1}}]
    out.write_text(json.dumps([{**text, "expiration_ttl": 3600}]))
    run("kv", "import", "KV", str(out), *there)
    run("kv", "export", "KV", "--output", str(out), *there)
    assert abs(json.loads(out.read_text())[1]["expiration"] - binary["expiration"]) < 1800
    for wrong in ({"key": 1}, {**text, "expiration": "soon"}):
        out.write_text(json.dumps([wrong]))
        with pytest.raises(CliError, match="not a list of keys with values"):
            run("kv", "import", "KV", str(out), *there)


def test_objects_lie_under_their_keys_and_those_that_are_no_paths_beside_them(
    here: tuple[str, str], there: tuple[str, str], tmp_path: Path
) -> None:
    lines, source = [], tmp_path / "source"
    source.mkdir()
    for number, key in enumerate(("a/b.txt", "a", "../out", "/abs", "x//y", ".hidden")):
        (source / str(number)).write_bytes(key.encode() * 1000)
        line = {
            "key": key,
            "file": str(number),
            "http_metadata": {"content_type": "text/plain"},
            "custom_metadata": {"k": key},
            "storage_class": "Standard",
        }
        lines.append(json.dumps(line))
    (source / ".objects.jsonl").write_text("\n".join(lines))
    assert run("r2", "import", "FILES", str(source), *here) == "6 objects were put\n"
    out = tmp_path / "out"
    assert "6 objects" in run("r2", "export", "files", "--output", str(out), *here)
    told = {each["key"]: each for each in map(json.loads, (out / ".objects.jsonl").read_text().splitlines())}
    assert {key for key, each in told.items() if each["file"] == key} in ({"a"}, {"a/b.txt"})
    for key, each in told.items():
        assert (out / each["file"]).resolve().is_relative_to(out.resolve())
        assert (out / each["file"]).read_bytes() == key.encode() * 1000
        assert (each["custom_metadata"], each["http_metadata"]["content_type"]) == ({"k": key}, "text/plain")
    with pytest.raises(CliError, match="is not empty"):
        run("r2", "export", "files", "--output", str(out), *here)
    assert run("r2", "import", "FILES", str(out), *there) == "6 objects were put\n"
    again = tmp_path / "again"
    run("r2", "export", "FILES", "--output", str(again), "--prefix", "a", *there)
    assert len((again / ".objects.jsonl").read_text().splitlines()) == 2
    shutil.rmtree(again)
