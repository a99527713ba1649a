"""The script that installs other servers for comparison."""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

SETUP = Path(__file__).parents[2] / "load_tests" / "peers" / "setup.sh"


def test_a_python_that_is_named_from_here_is_found_in_every_folder(tmp_path: Path) -> None:
    """The fake Python records its folder and arguments, and fails."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$PWD $*" >>{tmp_path}/asked\nexit 1\n')
    python.chmod(0o755)
    ended = subprocess.run(
        [SETUP, "peers", "bin/python"], cwd=tmp_path, capture_output=True, timeout=60, env={"PATH": os.environ["PATH"]}
    )
    assert ended.returncode == 1
    asked = (tmp_path / "asked").read_text()
    assert f"{tmp_path}/peers/llama -m pip download" in asked
    assert f"{SETUP.parents[2]} -m load_tests.peers.checkpoint {tmp_path}/peers/checkpoint" in asked
