"""`pilotlight analytics query` run as a command."""

import json
from pathlib import Path

import pytest

from pilotlight.functions.bindings.analytics import AnalyticsEngine
from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.manifest import BindingDeclaration
from pilotlight.runtime.cli.cli_error import CliError
from tests.functions.cli.test_state import run

MANIFEST = """
name = "f"
main = "entry.py"
[[analytics_engine_datasets]]
binding = "VISITS"
dataset = "page-visits"
"""


@pytest.fixture
async def here(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "entry.py").write_text("")
    (tmp_path / "wrangler.toml").write_text(MANIFEST)
    services = Services()
    declared = BindingDeclaration("analytics_engine", "VISITS", {"dataset": "page-visits"})
    dataset = AnalyticsEngine.open(declared, tmp_path / ".pilotlight", services)
    for page, seconds in (("/a", 1.5), ("/a", 2.5), ("/b", 7.0)):
        await dataset.call("write", [], {"blobs": [page], "doubles": [seconds]})
    await services.databases.close()
    return ("--dir", str(tmp_path))


def test_rows_are_selected_by_the_datasets_name_and_by_the_bindings(here: tuple[str, str]) -> None:
    sql = "SELECT blob1 AS page, sum(_sample_interval) AS n, avg(double1) AS s FROM {} GROUP BY 1 ORDER BY 1"
    expected = [{"page": "/a", "n": 2, "s": 2.0}, {"page": "/b", "n": 1, "s": 7.0}]
    for name, table in (("page-visits", '"page-visits"'), ("VISITS", "VISITS"), ("VISITS", '"page-visits"')):
        assert json.loads(run("analytics", "query", name, sql.format(table), "--json", *here)) == expected
    assert "/b" in run("analytics", "query", "VISITS", "SELECT blob1 FROM VISITS", *here)


def test_what_is_no_query_and_what_would_write_is_refused_by_sqlites_words(here: tuple[str, str]) -> None:
    for sql, words in (("SELECT absent FROM VISITS", "no such column"), ("DELETE FROM points", "readonly database")):
        with pytest.raises(CliError, match=words):
            run("analytics", "query", "VISITS", sql, *here)


def test_a_dataset_without_points_and_an_unknown_one_are_named(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("")
    (tmp_path / "wrangler.toml").write_text(MANIFEST)
    with pytest.raises(CliError, match="page-visits has no data points here"):
        run("analytics", "query", "VISITS", "SELECT 1", "--dir", str(tmp_path))
    with pytest.raises(CliError, match="There is no analytics 'other'"):
        run("analytics", "query", "other", "SELECT 1", "--dir", str(tmp_path))
