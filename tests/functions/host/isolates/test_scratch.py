"""The directory that isolates write to: measuring it, and enforcing its limit."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from pilotlight.functions.host.isolates.scratch import Scratch, bytes_below, empty
from pilotlight.functions.sandbox.confinement.user_ids import FunctionUser, UserIds

BLOCK = 4096


class Isolate:
    def __init__(self) -> None:
        self.ended: list[tuple[str, str]] = []
        self.is_gone = False

    def end(self, why: str, code: str) -> None:
        self.ended.append((why, code))

    async def until_gone(self) -> None:
        self.is_gone = True


def written(folder: Path, name: str, blocks: int) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * (blocks * BLOCK))


def test_all_that_lies_below_counts_and_each_file_by_its_own_place(tmp_path: Path) -> None:
    assert bytes_below(tmp_path, 10**9) == 0
    written(tmp_path, "a", 2)
    written(tmp_path, "b/c/d", 3)
    (tmp_path / "b/empty").touch()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    counted = bytes_below(tmp_path, 10**9)
    assert 5 * BLOCK + 4 * 512 <= counted <= 7 * BLOCK + 4 * 512
    assert 2 * BLOCK < bytes_below(tmp_path, 1) < counted, "counting stops at `enough`"


def test_what_is_emptied_stays_and_what_a_link_leads_to_is_left_alone(tmp_path: Path) -> None:
    folder, other = tmp_path / "scratch", tmp_path / "other"
    for name in ("a", "b/c/d"):
        written(folder, name, 1)
    written(other, "kept", 1)
    (folder / "link").symlink_to(other)
    empty(folder)
    assert [*folder.iterdir()] == []
    assert (other / "kept").exists()


@pytest.mark.parametrize("blocks", [200, 257])
async def test_only_beyond_its_limit_all_that_may_have_written_are_ended_and_it_is_emptied(
    tmp_path: Path, blocks: int
) -> None:
    scratch = Scratch(tmp_path / "deep" / "scratch", 1, FunctionUser(UserIds(is_root=False)), look_s=0.0)
    scratch.make()
    scratch.make()
    written(scratch.path, "file", blocks)
    isolates = [Isolate(), Isolate()]
    await asyncio.wait_for(scratch.enforce(cast(Any, isolates)), 60)
    beyond = blocks * BLOCK > 1 << 20
    assert [isolate.ended for isolate in isolates] == [[("its files have more than 1 MiB", "disk")] * beyond] * 2
    assert [isolate.is_gone for isolate in isolates] == [beyond] * 2
    assert (scratch.path / "file").exists() != beyond
    await scratch.remove()
    await scratch.remove()
    assert not scratch.path.exists()
