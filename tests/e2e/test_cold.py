"""The tools that measure cold starts: checkpoints of a given size, files that are not in the page cache, and plots."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from safetensors import safe_open

from load_tests import page_cache
from load_tests.random_checkpoint import Shape, add_tokenizer, tensors, write
from load_tests.scenarios.cold import Measured, described, median_of, row_of
from load_tests.timeline import Bar, svg

TINY = Shape(hidden=64, intermediate=96, layers=2, heads=2, kv_heads=1, head_dim=32)
ROOT = Path(__file__).parents[2]


def measured(ms: float) -> Measured:
    return Measured(ms, (Bar("weights", 0.0, ms / 2), Bar("first token", ms / 2, ms)))


def test_a_random_checkpoint_is_what_its_shape_says(tmp_path: Path) -> None:
    directory = write(tmp_path / "tiny", TINY)
    vocab = json.loads((directory / "config.json").read_text())["vocab_size"]
    with safe_open(directory / "model.safetensors", "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        projection = file.get_tensor("model.layers.0.mlp.up_proj.weight").float()
        norm = file.get_tensor("model.norm.weight").float()
    assert found == tensors(TINY, vocab)
    assert 0.015 < projection.std() < 0.025
    assert norm.eq(1).all()
    written = (directory / "model.safetensors").stat().st_mtime_ns
    write(tmp_path / "tiny", TINY)
    assert (directory / "model.safetensors").stat().st_mtime_ns == written, "the written checkpoint is reused"


def test_a_file_in_the_page_cache_is_seen_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1 << 20))
    page_cache.warm([file])
    assert page_cache.cached_share([file]) == 1.0
    assert 0.0 <= page_cache.drop([file]) <= 1.0, "the kernel need not drop the file, so the share is measured"
    assert page_cache.cached_share([]) == 0.0


def test_the_median_round_is_shown_whole() -> None:
    rounds = [measured(30.0), measured(10.0), measured(20.0)]
    assert median_of(rounds) == measured(20.0)
    assert described(rounds)["ms"]["median"] == 20.0
    assert [bar["ended_ms"] for bar in described(rounds)["timeline"]] == [10.0, 20.0]


def test_a_picture_has_every_row_and_every_phase() -> None:
    rows = [row_of("ember", "c", [measured(20.0)]), row_of("<3b>", "d", [measured(2000.0)])]
    root = ElementTree.fromstring(svg("Title & more", rows))
    said = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    for words in ("Title & more", "ember (c) asleep in host memory", "2,000 ms", "weights", "first token"):
        assert words in said
    bars = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if len(rect)]
    assert len(bars) == 4
    assert len({bar.get("fill") for bar in bars}) == 2, "a phase has the same colour everywhere"


@pytest.mark.slow
def test_the_bench_runs_from_the_command_line(tmp_path: Path) -> None:
    directory = write(tmp_path / "tiny", TINY)
    add_tokenizer(directory)
    options = f"--sizes {directory} --rounds 1 --threads 1".split()
    command = [sys.executable, "-m", "load_tests.scenarios.cold", *options]
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--plot", str(tmp_path / "cold.svg")], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "out").glob("*-cold-start.json")
    (facts,) = json.loads(record.read_text())["results"]["sizes"].values()
    assert set(facts["clocks"]) == {"a", "b", "c", "d", "e", "e0"}
    for clock in facts["clocks"].values():
        assert clock["ms"]["median"] > 0
        assert clock["timeline"][-1]["name"] == "first token"
    assert {"site process", "engine import", "weights"} <= {bar["name"] for bar in facts["clocks"]["b"]["timeline"]}
    assert "engine import" not in {bar["name"] for bar in facts["clocks"]["e"]["timeline"]}
    ElementTree.parse(tmp_path / "cold.svg")
