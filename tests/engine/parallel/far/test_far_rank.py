"""A rank on another machine starts only if it has the release and the checkpoint of the first rank. Other processes do not import Ray."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.engine.parallel.far.far_orders import FarStart
from pilotlight.engine.parallel.far.network import new_group_key
from pilotlight.engine.parallel.follower import FarRank
from pilotlight.engine.parallel.orders import LoadPart
from pilotlight.engine.parallel.part import check_checkpoint
from pilotlight.engine.parallel.release import difference, own_release
from pilotlight.engine.weights.digests import content_fingerprint, fingerprint
from tests.engine.families import write_family


def start(release: dict[str, str]) -> FarStart:
    return FarStart(1, release, "127.0.0.1", 9, new_group_key(), 9, "{}")


@pytest.mark.parametrize("name", ["pilotlight", "torch"])
def test_a_rank_of_another_release_refuses_by_name(name: str) -> None:
    said = FarRank().follow(start(own_release() | {name: "0.0.1"}))
    assert (
        f"it runs {name} {own_release()[name]}, but the first rank runs {name} 0.0.1: install the same release on both"
        in said
    )
    assert difference(own_release()) is None


@pytest.mark.process
def test_a_first_rank_that_is_not_there_is_named() -> None:
    assert "the first rank cannot be reached at 127.0.0.1, port 9" in FarRank().follow(start(own_release()))


def test_a_copy_of_a_checkpoint_is_the_same_and_another_one_is_refused_by_name(tmp_path: Path) -> None:
    write_family(tmp_path / "first", "llama, six heads over two")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    for file in (tmp_path / "copy").iterdir():
        os.utime(file, (1, 1))
    wanted = content_fingerprint(tmp_path / "first")

    def load(name: str) -> LoadPart:
        return LoadPart(ModelSpec("tiny", str(tmp_path / name)), 64, 0, 4, wanted)

    assert fingerprint(tmp_path / "copy") != fingerprint(tmp_path / "first")
    check_checkpoint(load("copy"))
    write_family(tmp_path / "other", "gemma3, windows but in layer 2, tied")
    with pytest.raises(CheckpointError, match="holds another checkpoint there than on the first rank's machine"):
        check_checkpoint(load("other"))
    with pytest.raises(CheckpointError, match="cannot be read there: No such file"):
        check_checkpoint(load("nowhere"))


@pytest.mark.process
def test_what_a_host_imports_of_ranks_imports_no_ray() -> None:
    code = "import sys, pilotlight.engine.parallel.ranks, pilotlight.engine.parallel.far.ray_placement; print('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
