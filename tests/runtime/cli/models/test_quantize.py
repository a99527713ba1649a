"""The quantize command as a user runs it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.commands import app
from tests.checkpoints import write_llama

runner = CliRunner()


@pytest.mark.process
def test_a_model_is_rounded_and_the_next_command_is_named(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16, num_attention_heads=4)
    out = tmp_path / "out"
    done = runner.invoke(app, ["quantize", str(tmp_path / "model"), "--to", "int4", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "model.safetensors").exists()
    assert f"pilotlight serve {out}" in done.output
    again = runner.invoke(app, ["quantize", str(tmp_path / "model"), "--to", "int4", "--out", str(out)])
    assert "holds a checkpoint already" in str(again.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantize", "nowhere", "--to", "int4"], "there is no directory nowhere"),
        (["quantize", "embedded:ember", "--to", "fp8"], "--to must be one of int8, int4, not fp8"),
        (["quantize", "embedded:ember", "--to", "int4", "--group", "48"], "--group 48 is no multiple of 32"),
    ],
)
def test_what_cannot_be_quantized_is_refused_in_a_sentence(arguments: list[str], words: str) -> None:
    failed = runner.invoke(app, arguments)
    assert isinstance(failed.exception, CliError)
    assert words in str(failed.exception)
