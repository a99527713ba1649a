"""`pilotlight d1` run as a command: wrangler's options, and migrations, each applied once or not at all."""

import json
import shlex
from pathlib import Path

import pytest

from pilotlight.runtime.cli.cli_error import CliError
from tests.functions.cli.test_state import run

MANIFEST = """
name = "f"
main = "entry.py"
[[d1_databases]]
binding = "DB"
database_name = "shop"
database_id = "1-2-3"
migrations_dir = "changes"
"""


@pytest.fixture
def here(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "entry.py").write_text("")
    (tmp_path / "wrangler.toml").write_text(MANIFEST)
    return ("--dir", str(tmp_path))


def test_binding_name_and_id_mean_the_same_database(here: tuple[str, str]) -> None:
    run("d1", "execute", "shop", "--local", "--command", "CREATE TABLE t (a)", *here)
    run("d1", "execute", "DB", "--command", "INSERT INTO t VALUES (7)", *here)
    assert "7" in run("d1", "execute", "1-2-3", "--command", "SELECT a FROM t", *here)


def test_remote_asks_for_a_sites_file(here: tuple[str, str]) -> None:
    with pytest.raises(CliError, match="needs --site"):
        run("d1", "execute", "DB", "--remote", "--command", "SELECT 1", *here)


def test_migrations_are_made_listed_and_applied_once_in_order(here: tuple[str, str]) -> None:
    folder = Path(here[1]) / "changes"
    made = run("d1", "migrations", "create", "shop", "add the table", *here).strip()
    assert Path(made).name == "0001_add_the_table.sql"
    Path(made).write_text("CREATE TABLE t (a);\nINSERT INTO t VALUES (1);")
    (folder / "0002_more.sql").write_text("INSERT INTO t SELECT a + 1 FROM t;")
    assert run("d1", "migrations", "list", "shop", *here).split() == ["0001_add_the_table.sql", "0002_more.sql"]
    assert "0002_more.sql  applied" in run("d1", "migrations", "apply", "DB", "--local", *here)
    assert run("d1", "migrations", "apply", "shop", *here) == "No migrations to apply\n"
    assert run("d1", "migrations", "list", "shop", *here) == "No migrations to apply\n"
    assert (
        run("d1", "execute", "shop", "--json", "--command", "SELECT a FROM t", *here).strip() == '[{"a": 1}, {"a": 2}]'
    )
    names = run("d1", "execute", "shop", "--json", "--command", "SELECT name FROM d1_migrations", *here)
    assert "0001_add_the_table.sql" in names


def test_a_migration_that_fails_leaves_nothing_of_itself(here: tuple[str, str]) -> None:
    folder = Path(here[1]) / "changes"
    folder.mkdir()
    (folder / "0001_bad.sql").write_text("CREATE TABLE t (a); INSERT INTO nowhere VALUES (1);")
    with pytest.raises(CliError, match=r"0001_bad\.sql was not applied: .*no such table: nowhere"):
        run("d1", "migrations", "apply", "shop", *here)
    (folder / "0001_bad.sql").write_text("CREATE TABLE t (a);")
    assert "applied" in run("d1", "migrations", "apply", "shop", *here)


def test_migrations_are_applied_by_their_numbers(here: tuple[str, str]) -> None:
    folder = Path(here[1]) / "changes"
    folder.mkdir()
    for name in ("10_last.sql", "2_second.sql", "1_first.sql", "seed.sql"):
        (folder / name).write_text(f"CREATE TABLE IF NOT EXISTS t (name); INSERT INTO t VALUES ('{name}');")
    expected = ["1_first.sql", "2_second.sql", "10_last.sql", "seed.sql"]
    assert run("d1", "migrations", "list", "shop", *here).split() == expected
    assert run("d1", "migrations", "apply", "shop", *here).split() == [
        word for name in expected for word in (name, "applied")
    ]


@pytest.mark.long
def test_a_migration_and_a_script_may_have_any_number_of_statements_and_are_whole_or_nothing(
    here: tuple[str, str],
) -> None:
    folder = Path(here[1]) / "changes"
    folder.mkdir()
    many = "CREATE TABLE t (a);\n" + "INSERT INTO t VALUES (1);\n" * 1500
    (folder / "0001_many.sql").write_text(many + "INSERT INTO nowhere VALUES (1);")
    with pytest.raises(CliError, match="no such table: nowhere"):
        run("d1", "migrations", "apply", "shop", *here)
    (folder / "0001_many.sql").write_text(many)
    run("d1", "migrations", "apply", "shop", *here)
    script = Path(here[1]) / "script.sql"
    script.write_text("INSERT INTO t VALUES (2);\n" * 1500 + "INSERT INTO nowhere VALUES (1);")
    with pytest.raises(CliError, match="no such table: nowhere"):
        run("d1", "execute", "shop", "--file", str(script), *here)
    script.write_text("INSERT INTO t VALUES (2);\n" * 1500)
    assert run("d1", "execute", "shop", "--file", str(script), *here) == "1500 statements\n"
    counted = run("d1", "execute", "shop", "--json", "--command", "SELECT a, count(*) AS n FROM t GROUP BY a", *here)
    assert counted.strip() == '[{"a": 1, "n": 1500}, {"a": 2, "n": 1500}]'


def test_a_migration_may_say_the_pragma_of_foreign_keys_and_hears_that_it_has_no_effect(
    here: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(here[1]) / "changes"
    folder.mkdir()
    (folder / "0001_rebuild.sql").write_text("PRAGMA foreign_keys=OFF;\nCREATE TABLE t (a);\nPRAGMA foreign_keys=ON;\n")
    run("d1", "migrations", "apply", "shop", *here)
    assert run("d1", "execute", "shop", "--json", "--command", "PRAGMA foreign_keys", *here).strip() == (
        '[{"foreign_keys": 1}]'
    )


def test_a_database_is_restored_to_a_bookmark_or_a_time_and_the_restoration_is_undone(here: tuple[str, str]) -> None:
    def count() -> str:
        return run("d1", "execute", "shop", "--json", "--command", "SELECT count(*) AS n FROM t", *here).strip()

    run("d1", "execute", "shop", "--command", "CREATE TABLE t (a)", *here)
    run("d1", "execute", "shop", "--command", "INSERT INTO t VALUES (1)", *here)
    before = json.loads(run("d1", "time-travel", "info", "DB", "--json", *here))
    run("d1", "execute", "shop", "--command", "DROP TABLE t", *here)
    said = run("d1", "time-travel", "restore", "shop", "--bookmark", before["bookmark"], *here)
    assert count() == '[{"n": 1}]'
    run(*shlex.split(said.partition("To undo this: pilotlight ")[2]))
    with pytest.raises(CliError, match="no such table: t"):
        count()
    run("d1", "time-travel", "restore", "shop", "--timestamp", "2100-01-01T00:00:00Z", *here)
    with pytest.raises(CliError, match="no such table: t"):
        count()


def test_a_moment_without_a_history_and_a_misspelt_one_are_named(here: tuple[str, str]) -> None:
    with pytest.raises(CliError, match="has no data here"):
        run("d1", "time-travel", "info", "shop", *here)
    run("d1", "execute", "shop", "--command", "CREATE TABLE t (a)", *here)
    with pytest.raises(CliError, match="shop: the history does not reach back to 2020-01-01T00:00:00Z: it begins at"):
        run("d1", "time-travel", "info", "shop", "--timestamp", "2020-01-01T00:00:00Z", *here)
    with pytest.raises(CliError, match="'noon' is not a time"):
        run("d1", "time-travel", "restore", "shop", "--timestamp", "noon", *here)
    with pytest.raises(CliError, match="either --timestamp or --bookmark"):
        run("d1", "time-travel", "restore", "shop", *here)
