"""Faults in the tiers of the KV cache: any part may be damaged, lost or late. Answers stay those of an engine without tiers, and each damage is
counted and logged. Without a tier's check the same damage changes an answer, which shows that these tests can fail.
`python -m tests.engine.damaged_requests` runs thousands of requests through the same damages.
"""

from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.kv.peers.transports import SharedMemoryTransport
from tests.checkpoints import write_llama
from tests.engine.damaged_tiers import (
    DISK,
    HOST,
    PEER,
    STORE,
    TRANSPORTS,
    Counted,
    Damaged,
    damaged_disk,
    damaged_host,
    damaged_peer,
    damaged_store,
    remove_check,
    undamaged,
)
from tests.engine.driver import random_prompt

pytestmark = pytest.mark.usefixtures("always_worth_it")

PROMPTS = [random_prompt(70, seed) for seed in (1, 2)]  # each has four full blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_llama(directory)
    return directory


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return undamaged(model, PROMPTS)


def check(found: Damaged, expected: list[list[int]], counted: Counted) -> None:
    is_damage = counted != "none"
    assert found.answers == expected
    assert (found.num_corrupt > 0) == is_damage
    assert is_damage or found.num_cached == [0, 0]
    assert (found.num_warnings > 0) == is_damage


@pytest.mark.parametrize("damage", HOST)
def test_a_damaged_host_tier_changes_no_answer(
    model: Path, expected: list[list[int]], tmp_path: Path, damage: str
) -> None:
    check(damaged_host(model, PROMPTS, tmp_path, damage), expected, HOST[damage][1])


@pytest.mark.parametrize("damage", DISK)
def test_a_damaged_disk_tier_changes_no_answer(
    model: Path, expected: list[list[int]], tmp_path: Path, damage: str
) -> None:
    check(damaged_disk(model, PROMPTS, tmp_path, damage), expected, DISK[damage][1])


@pytest.mark.process
@pytest.mark.parametrize("damage", STORE)
def test_a_damaged_store_changes_no_answer(model: Path, expected: list[list[int]], tmp_path: Path, damage: str) -> None:
    check(damaged_store(model, PROMPTS, tmp_path, damage), expected, STORE[damage][1])


@pytest.mark.process
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("damage", PEER)
def test_damage_between_two_hosts_changes_no_answer(
    model: Path,
    expected: list[list[int]],
    tmp_path: Path,
    transport: type[Any],
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = damaged_peer(model, PROMPTS, tmp_path, transport, damage, monkeypatch)
    assert found.answers == expected
    assert found.num_cached[0] == 0
    assert damage == "lost link" or found.num_cached[1] == 0  # after a lost link the next read uses another transport
    assert (found.num_corrupt > 0) == (PEER[damage] != "none")


@pytest.mark.process
@pytest.mark.parametrize("tier", ["host", "disk", "store", "peer"])
def test_without_its_check_a_tier_would_answer_wrongly(
    model: Path, expected: list[list[int]], tmp_path: Path, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove_check(monkeypatch, tier)
    if tier == "host":
        found = damaged_host(model, PROMPTS, tmp_path, "swapped bodies")
    elif tier == "disk":
        found = damaged_disk(model, PROMPTS, tmp_path, "swapped bodies")
    elif tier == "store":
        found = damaged_store(model, PROMPTS, tmp_path, "swapped bodies")
    else:
        found = damaged_peer(model, PROMPTS, tmp_path, SharedMemoryTransport, "other block", monkeypatch)
    assert found.answers != expected
