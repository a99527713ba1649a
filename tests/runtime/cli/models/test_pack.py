"""The pack command as a user runs it."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.commands import app
from pilotlight.runtime.cli.models.pack import work
from pilotlight.runtime.fetching.listing import NAME, digest_of
from tests.checkpoints import write_llama

pytestmark = pytest.mark.process

runner = CliRunner()


def test_a_model_is_packed_and_checked_and_damage_is_reported(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    out = tmp_path / "out"
    done = runner.invoke(app, ["pack", str(tmp_path / "model"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    (bundle,) = out.glob("*.bundle.safetensors")
    assert bundle.name in done.output
    assert f'source = "{out}"' in done.output
    assert f"https://HOST/out#sha256={digest_of((out / NAME).read_bytes())}" in done.output
    checked = runner.invoke(app, ["pack", "--verify", str(out)])
    assert checked.output.endswith("is whole.\n")
    bundle.write_bytes(bundle.read_bytes()[:-100])
    damaged = runner.invoke(app, ["pack", "--verify", str(out)])
    assert isinstance(damaged.exception, CliError)
    assert "cut off" in str(damaged.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pack", "nowhere"], "there is no directory nowhere"),
        (["pack", "embedded:ember", "--dtype", "float8"], "--dtype must be one of auto, float32, bfloat16, not float8"),
        (["pack", "embedded:ember", "--dtype", "float32", "--lossless"], "--lossless is for plain weights in bfloat16"),
        (["pack", "--verify", "."], "holds no bundle; `pilotlight pack` makes one"),
    ],
)
def test_what_cannot_be_packed_is_refused_in_a_sentence(arguments: list[str], words: str) -> None:
    failed = runner.invoke(app, arguments)
    assert isinstance(failed.exception, CliError)
    assert words in str(failed.exception)


def test_ctrl_c_of_a_terminal_does_not_reach_the_working_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "works.py").write_text("import json, os\nprint(json.dumps({'path': os.getpgrp()}))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert work("works", [], lambda done, total: None)["path"] != os.getpgrp()
