"""Records say what was measured, wherever the tree was brought."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from load_tests import records


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    records.commit.cache_clear()
    yield
    records.commit.cache_clear()


def test_without_git_a_record_is_written_with_the_commit_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # nothing is installed
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PILOTLIGHT_COMMIT", "c0ffee")
    assert json.loads(records.write_record("nothing", {}).read_text())["commit"] == "c0ffee"
    records.commit.cache_clear()
    monkeypatch.delenv("PILOTLIGHT_COMMIT")
    assert json.loads(records.write_record("nothing", {}).read_text())["commit"] == "unknown"
