"""`pilotlight secret`, `kv`, `d1` and `queues` run as commands, on the state of `pilotlight dev` and of a site."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.bindings.secrets.secret_store import SecretStore
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.commands import app

MANIFEST = """
name = "f"
main = "entry.py"
[[kv_namespaces]]
binding = "CACHE"
id = "kv-1"
[[d1_databases]]
binding = "DB"
database_id = "d1-1"
[[queues.producers]]
binding = "JOBS"
queue = "jobs"
[[queues.consumers]]
queue = "failed"
"""
SITE = """
name = "ams1"
place = {{ city = "Amsterdam", latitude = 52.31, longitude = 4.76 }}
listen = {{ port = 0 }}
[[models]]
name = "tiny"
source = "embedded:ember"
[functions]
state_dir = "{state}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "entry.py").write_text("")
    (tmp_path / "wrangler.toml").write_text(MANIFEST)
    (tmp_path / "site.toml").write_text(SITE.format(state=tmp_path / "state"))
    return tmp_path


def run(*arguments: str, given: str | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=given)
    if isinstance(result.exception, CliError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_keys_are_put_listed_read_and_deleted_by_the_bindings_name(folder: Path) -> None:
    here = ("--dir", str(folder))
    run("kv", "put", "CACHE", "a/1", "one", *here)
    (folder / "value").write_bytes(b"\x00two")
    run("kv", "put", "CACHE", "a/2", "--path", str(folder / "value"), *here)
    run("kv", "put", "kv-1", "b", "by its id", "--ttl", "60", *here)
    assert run("kv", "list", "CACHE", "--prefix", "a/", *here) == "a/1\na/2\n"
    assert run("kv", "get", "CACHE", "b", *here) == "by its id"
    run("kv", "delete", "CACHE", "a/1", *here)
    with pytest.raises(CliError, match="has no key 'a/1'"):
        run("kv", "get", "CACHE", "a/1", *here)
    with pytest.raises(CliError, match="512"):
        run("kv", "put", "CACHE", "x" * 600, "v", *here)
    with pytest.raises(CliError, match="either a value or --path"):
        run("kv", "put", "CACHE", "x", *here)


def test_sql_is_run_and_its_rows_are_printed(folder: Path) -> None:
    here = ("--dir", str(folder))
    (folder / "schema.sql").write_text(
        "CREATE TABLE t (id INTEGER PRIMARY KEY, name TEXT);\nINSERT INTO t (name) VALUES ('a'), ('b');"
    )
    assert run("d1", "execute", "DB", "--file", str(folder / "schema.sql"), *here) == "2 statements\n"
    assert run("d1", "execute", "DB", "--command", "UPDATE t SET name = 'c' WHERE id = 2", *here) == "1 rows changed\n"
    rows: Any = json.loads(run("d1", "execute", "DB", "--command", "SELECT * FROM t", "--json", *here))
    assert rows == [{"id": 1, "name": "a"}, {"id": 2, "name": "c"}]
    assert "name" in run("d1", "execute", "DB", "--command", "SELECT * FROM t", *here)
    with pytest.raises(CliError, match="no such table"):
        run("d1", "execute", "DB", "--command", "SELECT * FROM missing", *here)


def test_messages_are_sent_counted_and_purged(folder: Path) -> None:
    here = ("--dir", str(folder))
    run("queues", "send", "JOBS", '{"n": 1}', *here)
    run("queues", "send", "JOBS", "plain text", *here)
    assert run("queues", "list", *here) == "jobs  2 messages\n"
    assert run("queues", "purge", "JOBS", *here) == "2 messages deleted\n"
    assert run("queues", "list", *here) == "jobs  0 messages\n"


def test_a_queue_whose_name_is_no_folders_name_is_counted_and_listed_once(folder: Path) -> None:
    (folder / "wrangler.toml").write_text(MANIFEST.replace('"jobs"', '"my.jobs"'))
    run("queues", "send", "JOBS", "1", "--dir", str(folder))
    listed = run("queues", "list", "--dir", str(folder))
    assert listed.startswith("my-jobs")
    assert listed.endswith("  1 messages\n")
    assert run("queues", "list", "--dir", str(folder)) == listed


def test_brackets_in_rows_are_printed_as_they_are(folder: Path) -> None:
    asked = ("d1", "execute", "DB", "--command", "SELECT '[bold]x[/bold] [1]' AS \"[red]\", '[/]' AS b")
    head, row = run(*asked, "--dir", str(folder)).splitlines()
    assert (head.split(), row.split()) == (["[red]", "b"], ["[bold]x[/bold]", "[1]", "[/]"])


def test_a_script_answers_in_json_if_asked_to(folder: Path) -> None:
    asked = ("d1", "execute", "DB", "--json", "--command", "CREATE TABLE a (b); CREATE TABLE c (d)")
    assert json.loads(run(*asked, "--dir", str(folder))) == {"count": 2}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("kv", "put", "CACHES", "a", "b"), "no kv 'CACHES': the manifest's are CACHE"),
        (("d1", "execute", "d1-2", "--command", "CREATE TABLE t (a)"), "no d1 'd1-2': the manifest's are DB"),
        (("queues", "send", "job", "1"), "no queue 'job': the manifest's are JOBS"),
    ],
)
def test_a_name_that_is_misspelt_makes_no_store(folder: Path, command: tuple[str, ...], message: str) -> None:
    with pytest.raises(CliError, match=message):
        run(*command, "--dir", str(folder))
    assert not (folder / ".pilotlight").exists()


@pytest.fixture
def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """A folder without a manifest, and a site that has one store of each kind."""
    there = ("--site", str(folder / "site.toml"))
    for command in (
        ("kv", "put", "CACHE", "a", "b"),
        ("d1", "execute", "DB", "--command", "CREATE TABLE t (a)"),
        ("queues", "send", "JOBS", "1"),
    ):
        run(*command, *there, "--dir", str(folder))
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    return there


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("kv", "put", "CACHE", "a", "b"), "no kv 'CACHE' at this site, which has kv-1. .* --dir"),
        (("kv", "get", "CACHE", "a"), "no kv 'CACHE'"),
        (("kv", "delete", "CACHE", "a"), "no kv 'CACHE'"),
        (("kv", "list", "CACHE"), "no kv 'CACHE'"),
        (("kv", "export", "CACHE", "--output", "out"), "no kv 'CACHE'"),
        (("kv", "import", "CACHE", "../keys.json"), "no kv 'CACHE'"),
        (("d1", "execute", "DB", "--command", "CREATE TABLE t (a)"), "no d1 'DB' at this site, which has d1-1"),
        (("d1", "export", "DB", "--output", "out"), "no d1 'DB'"),
        (("d1", "import", "DB", "../schema.sql"), "no d1 'DB'"),
        (("d1", "migrations", "list", "DB"), "no d1 'DB'"),
        (("d1", "migrations", "apply", "DB"), "no d1 'DB'"),
        (("d1", "time-travel", "info", "DB"), "no d1 'DB'"),
        (("d1", "time-travel", "restore", "DB", "--timestamp", "1m"), "no d1 'DB'"),
        (("r2", "export", "FILES", "--output", "out"), "no r2 'FILES' at this site, which has none"),
        (("r2", "import", "FILES", ".."), "no r2 'FILES'"),
        (("queues", "send", "nonsense", "{}"), "no queue 'nonsense' at this site, which has jobs"),
        (("queues", "purge", "nonsense"), "no queue 'nonsense'"),
        (("analytics", "query", "VISITS", "SELECT 1"), "no analytics 'VISITS' at this site, which has none"),
    ],
)
def test_outside_a_functions_folder_only_existing_stores_of_the_site_are_known(
    folder: Path, elsewhere: tuple[str, str], command: tuple[str, ...], message: str
) -> None:
    (folder / "keys.json").write_text('[{"key": "a", "value": "b"}]')
    (folder / "schema.sql").write_text("CREATE TABLE t (a)")
    (folder / ".objects.jsonl").write_text("")
    before = sorted(folder.rglob("*"))
    with pytest.raises(CliError, match=message):
        run(*command, *elsewhere)
    assert sorted(folder.rglob("*")) == before


def test_outside_a_functions_folder_a_store_has_its_id(elsewhere: tuple[str, str]) -> None:
    run("kv", "put", "kv-1", "c", "d", *elsewhere)
    assert run("kv", "list", "kv-1", *elsewhere) == "a\nc\n"
    assert run("d1", "execute", "d1-1", "--command", "DELETE FROM t", *elsewhere) == "0 rows changed\n"
    run("queues", "send", "jobs", "2", *elsewhere)
    assert run("queues", "purge", "jobs", *elsewhere) == "2 messages deleted\n"


def test_a_deployed_functions_store_without_an_id_has_its_name_at_the_site(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "wrangler.toml").write_text(MANIFEST.replace('id = "kv-1"', ""))
    site, here = ("--site", str(folder / "site.toml")), ("--dir", str(folder))
    (folder / "site.toml").write_text(SITE.format(state=folder / "state") + 'deployments = "http://127.0.0.1:1"\n')
    stored = directory_of(folder / "state", "kv", "f/CACHE")
    run("kv", "put", "CACHE", "a", "b", *site, *here)
    assert stored.is_dir()
    assert len([*stored.parent.iterdir()]) == 1
    (stored / "owner").write_text("f")
    monkeypatch.chdir(folder / "state")
    assert run("kv", "get", "f/CACHE", "a", *site) == "b"
    with pytest.raises(CliError, match="which has f/CACHE"):
        run("kv", "get", "CACHE", "a", *site)


@pytest.mark.parametrize(
    "command",
    [
        ("kv", "list", "CACHE"),
        ("kv", "get", "CACHE", "a"),
        ("kv", "delete", "CACHE", "a"),
        ("kv", "export", "CACHE", "--output", "out"),
        ("queues", "list"),
        ("queues", "purge", "JOBS"),
        ("d1", "migrations", "list", "DB"),
    ],
)
def test_a_command_that_reads_leaves_a_folder_that_was_never_served_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "migrations").mkdir()
    with suppress(CliError):
        run(*command, "--dir", str(folder))
    assert not (folder / ".pilotlight").exists()


@pytest.mark.parametrize(
    ("command", "file", "message"),
    [
        (("kv", "put", "CACHE", "a", "--path"), "nowhere", "nowhere cannot be read: No such file"),
        (("kv", "put", "CACHE", "a", "--path"), ".", "cannot be read: Is a directory"),
        (("d1", "execute", "DB", "--file"), "nowhere", "nowhere cannot be read: No such file"),
        (("d1", "execute", "DB", "--file"), "bytes.sql", r"bytes\.sql is not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(folder: Path, command: tuple[str, ...], file: str, message: str) -> None:
    (folder / "bytes.sql").write_bytes(b"\xff\xfe")
    with pytest.raises(CliError, match=message):
        run(*command, str(folder / file), "--dir", str(folder))


def test_stores_of_the_manifest_before_and_queues_that_are_only_consumed_are_known(folder: Path) -> None:
    here = ("--dir", str(folder))
    run("kv", "put", "CACHE", "a", "b", *here)
    (folder / "wrangler.toml").write_text(MANIFEST.replace("kv-1", "kv-2"))
    assert run("kv", "get", "kv-1", "a", *here) == "b"
    run("queues", "send", "failed", "1", *here)
    assert run("queues", "purge", "failed", *here) == "1 messages deleted\n"


def test_secrets_are_sealed_where_a_sites_file_says(folder: Path) -> None:
    there = ("--site", str(folder / "site.toml"))
    run("secret", "put", "f", "TOKEN", *there, given="s3cret\n")
    assert run("secret", "list", "f", *there) == "TOKEN\n"
    assert SecretStore(folder / "state").values("f") == {"TOKEN": "s3cret"}
    assert not any(b"s3cret" in path.read_bytes() for path in (folder / "state").rglob("*") if path.is_file())
    key = (folder / "state" / "bindings" / "secret" / "key").read_bytes()
    assert run("secret", "rotate-key", *there) == "1 functions and stores have their secrets encrypted with a new key\n"
    assert (folder / "state" / "bindings" / "secret" / "key").read_bytes() != key
    assert SecretStore(folder / "state").values("f") == {"TOKEN": "s3cret"}
    run("secret", "delete", "f", "TOKEN", *there)
    for arguments in (("delete", "f", "TOKEN"), ("put", "f", "TOKEN")):
        with pytest.raises(CliError, match=r"has no secret|is empty"):
            run("secret", *arguments, *there, given="")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("command", [("secret", "rotate-key"), ("kv", "list", "CACHE")])
def test_state_of_another_user_is_left_alone(folder: Path, command: tuple[str, ...]) -> None:
    (folder / "state").mkdir()
    os.chown(folder / "state", 54321, 54321)
    with pytest.raises(CliError, match="is #54321's: run this as #54321"):
        run(*command, "--site", str(folder / "site.toml"))
    assert not [*(folder / "state").iterdir()]


def test_a_folder_that_is_no_functions_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="has no manifest"):
        run("kv", "list", "CACHE", "--dir", str(tmp_path))


@pytest.mark.parametrize("command", ["dev", "deploy"])
def test_the_help_names_the_manifests_section(command: str) -> None:
    assert "[env.NAME]" in CliRunner().invoke(app, [command, "--help"]).output
