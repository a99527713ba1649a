"""User ids of functions: unique across the sites of a machine, and reused after their return."""

import subprocess
import sys
from pathlib import Path

import pytest

from pilotlight.functions.sandbox.confinement.user_ids import BLOCK_IDS, FIRST_UID, FunctionUser, UserIds
from pilotlight.sites.config import ConfigError

HOLDER = """
import sys
from pathlib import Path
from pilotlight.functions.sandbox.confinement.user_ids import UserIds

ids = UserIds(Path(sys.argv[1]), is_root=True)
print(ids.take(), flush=True)
sys.stdin.read()
"""


def test_a_site_that_has_used_up_its_block_takes_no_id_of_another_site(tmp_path: Path) -> None:
    sites = [UserIds(tmp_path, is_root=True) for _ in range(3)]
    taken = [site.take() for _ in range(2 * BLOCK_IDS) for site in sites]
    assert len(set(taken)) == len(taken)
    assert min(uid for uid in taken if uid is not None) == FIRST_UID


def test_ids_that_are_given_back_are_used_again_the_longest_free_first(tmp_path: Path) -> None:
    site, neighbour = UserIds(tmp_path, is_root=True), UserIds(tmp_path, is_root=True)
    assert neighbour.take() == FIRST_UID
    seen = []
    for _ in range(20 * BLOCK_IDS):
        user = FunctionUser(site)
        seen.append(user.id)
        assert user.id == seen[-1], "the id stays the same until it is released"
        user.release()
        user.release()
    assert len(set(seen)) == BLOCK_IDS
    assert seen[BLOCK_IDS : 2 * BLOCK_IDS] == seen[:BLOCK_IDS]


@pytest.mark.process
def test_the_ids_of_a_site_that_was_killed_are_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) == FIRST_UID
        site = UserIds(tmp_path, is_root=True)
        assert site.take() == FIRST_UID + BLOCK_IDS
        holder.kill()
    assert UserIds(tmp_path, is_root=True).take() == FIRST_UID


def test_without_root_there_is_no_other_user(tmp_path: Path) -> None:
    assert UserIds(tmp_path, is_root=False).take() is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be reserved in .*file/ids: .*; make that folder writable"):
        UserIds(tmp_path / "file" / "ids", is_root=True).take()
