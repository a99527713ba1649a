"""A worker's role, and configurations that several workers can keep to."""

import os
from pathlib import Path
from typing import Any

import pytest

from pilotlight.edge_router.workers.role import WORKER_ENV, WorkerRole, abandoned_ledgers, check_workers
from pilotlight.sites.config import ConfigError
from pilotlight.wire.hop.meters import FILE_NAME, MeterFile
from tests.edge_router.builders import network

URLS = {"ams1": "http://127.0.0.1:9"}
POSTGRES = "postgresql://pilotlight@127.0.0.1/none"


def test_a_role_is_read_as_it_was_given_and_only_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    role = WorkerRole(1, 3, 7, tmp_path / "a, b")
    monkeypatch.setenv(WORKER_ENV, role.encode())
    assert WorkerRole.present() == role
    assert WorkerRole.present() is None


def test_each_worker_has_a_folder_of_its_own_for_the_ledger(tmp_path: Path) -> None:
    kept = network(URLS, ledger={"directory": "/kept", "store": POSTGRES})
    first, second = (WorkerRole(index, 2, 0, tmp_path).configured(kept) for index in range(2))
    assert (first.ledger.directory, second.ledger.directory) == ("/kept", "/kept/worker-1")


@pytest.mark.parametrize("index", [0, 1])
def test_a_successor_counts_in_another_folder_until_its_predecessor_has_ended(index: int, tmp_path: Path) -> None:
    def folder() -> Path:
        kept = network(URLS, ledger={"directory": str(tmp_path), "store": POSTGRES})
        found = Path(WorkerRole(index, 2, 0, tmp_path).configured(kept).ledger.directory or "")
        found.mkdir(exist_ok=True)
        return found

    usual = tmp_path / "worker-1" if index else tmp_path
    assert folder() == usual
    predecessor = MeterFile(folder() / FILE_NAME, 16)
    successor = MeterFile(folder() / FILE_NAME, 16)
    third = folder()
    assert [third.name, third.parent] == [f"worker-{index}.2", tmp_path]
    predecessor.close()
    assert folder() == usual
    successor.close()
    os.utime(tmp_path / f"worker-{index}.1" / FILE_NAME, (2e9, 2e9))
    assert folder().name == f"worker-{index}.1", "its process may have been killed"


@pytest.mark.parametrize(
    ("role", "own", "abandoned"),
    [
        ((0, 2), "", ["worker-0.1", "worker-2", "worker-2.1", "worker-10"]),
        ((0, 2), "worker-0.1", ["", "worker-2", "worker-2.1", "worker-10"]),
        ((1, 2), "worker-1.1", ["worker-1"]),
        ((2, 11), "worker-2", ["worker-2.1"]),
        (None, "", ["worker-0.1", "worker-1", "worker-1.1", "worker-2", "worker-2.1", "worker-10"]),
    ],
)
def test_each_folder_that_its_process_has_left_belongs_to_one_that_runs(
    role: tuple[int, int] | None, own: str, abandoned: list[str], tmp_path: Path
) -> None:
    for name in ("", "worker-0.1", "worker-1", "worker-1.1", "worker-2", "worker-2.1", "worker-10", "worker-old"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / FILE_NAME).touch()
    (tmp_path / "worker-12").mkdir()  # without meters
    (tmp_path / "worker-11").mkdir()
    running = MeterFile(tmp_path / "worker-11" / FILE_NAME, 16)
    one = None if role is None else WorkerRole(*role, 0, tmp_path)
    found = abandoned_ledgers(tmp_path, tmp_path / own, one)
    assert set(found) == {tmp_path / name for name in abandoned}
    running.close()


ACCOUNT: dict[str, Any] = {"name": "acme"}


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"accounts": [{**ACCOUNT, "requests_per_min": 5}]}, "quotas.store"),
        ({"tenant_limits": {"max_open": 5}}, "quotas.store"),
        ({"ledger": {"directory": "/kept"}}, "ledger.store"),
        ({"objectives": [{"model": "*", "answered": 0.9}]}, "objectives"),
        ({"door": {"server": "hypercorn"}}, "door.server is hypercorn"),
    ],
)
def test_what_each_worker_would_count_for_itself_is_refused_with_what_to_change(
    tables: dict[str, Any], sentence: str
) -> None:
    asked = network(URLS, **tables)
    check_workers(asked, 1)
    with pytest.raises(ConfigError, match=sentence):
        check_workers(asked, 2)


def test_limits_and_a_ledger_in_a_database_are_kept_by_any_number_of_workers() -> None:
    tables = {"quotas": {"store": POSTGRES}, "ledger": {"directory": "/kept", "store": POSTGRES}}
    check_workers(network(URLS, **tables, accounts=[{**ACCOUNT, "max_open": 5}]), 4)


@pytest.mark.parametrize("count", [0, 65])
def test_a_number_of_workers_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="between"):
        check_workers(network(URLS), count)
