"""Records of measurements name the commit and the machine, also for a tree without git."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from load_tests import records

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    records.commit.cache_clear()
    records.describe_machine.cache_clear()
    yield
    records.commit.cache_clear()
    records.describe_machine.cache_clear()


def test_without_git_a_record_is_written_with_the_commit_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # git and lscpu are not found
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PILOTLIGHT_COMMIT", "c0ffee")
    assert json.loads(records.write_record("nothing", {}).read_text())["commit"] == "c0ffee"
    records.commit.cache_clear()
    monkeypatch.delenv("PILOTLIGHT_COMMIT")
    assert json.loads(records.write_record("nothing", {}).read_text())["commit"] == "unknown"


def test_a_record_names_what_the_processor_multiplies_with(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    one = "model name\t: A Processor\nflags\t\t: fpu avx2 avx512f amx_bf16 amx_tile amx_bf16_more\n\n"
    cpuinfo.write_text(f"processor\t: 0\n{one}processor\t: 1\n{one}")
    found = records.describe_machine(cpuinfo)
    assert (found["processor"], found["flags"]) == ("A Processor", ["avx2", "avx512f", "amx_tile", "amx_bf16"])


def test_a_record_with_limited_kernels_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("PILOTLIGHT_CPU", "avx2")
    path = records.write_record("engines", {})
    assert path.name.endswith("-avx2-engines.json")
    assert records.cpu_kind(json.loads(path.read_text())["machine"]).endswith("limited to avx2")


def test_a_machine_that_says_nothing_of_its_processor_has_a_record(tmp_path: Path) -> None:
    found = records.describe_machine(tmp_path / "missing")
    assert found["processor"]
    assert found["flags"] == []
