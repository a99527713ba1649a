"""Which products are left to torch is measured where its library has what ours lacks, once, and kept."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kernels.cpu import crossover
from kernels.cpu.crossover import UNLIMITED, keep_most_rows

BF16 = torch.bfloat16
pytestmark = pytest.mark.cpu_only


def slow_from(rows: int) -> int:
    return crossover.crossover(lambda n: 2.0 if n >= rows else 0.5, lambda n: 1.0)


def test_ours_are_used_up_to_the_first_number_of_rows_at_which_torchs_is_faster() -> None:
    assert slow_from(16) == 8
    assert slow_from(1) == 0
    assert slow_from(10**6) == UNLIMITED
    assert crossover.crossover(lambda n: 1.1, lambda n: 1.0) == UNLIMITED, "what a recording saves is worth more"


def wait_for_measurement() -> None:
    for thread in threading.enumerate():
        if thread.name == "cpu-crossover":
            thread.join()


def test_what_was_measured_is_found_again_by_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(crossover, "crossover", lambda ours, torchs: calls.append(ours(2)) or 8)
    monkeypatch.setattr(crossover, "_OUTPUTS", 16)
    file, rows = tmp_path / "kernels.json", {BF16: 24}
    keep_most_rows(rows, [BF16], torch.nn.functional.linear, file)
    wait_for_measurement()
    assert rows == {BF16: 8}
    assert len(calls) == 1
    again = {BF16: 24}
    keep_most_rows(again, [BF16], torch.nn.functional.linear, file)
    assert again == {BF16: 8}
    assert len(calls) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"of": ["1.0", 2], "rows": {}}'])
def test_a_file_of_other_circumstances_or_none_is_measured_anew(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossover, "crossover", lambda ours, torchs: 4)
    monkeypatch.setattr(crossover, "_OUTPUTS", 16)
    file, rows = tmp_path / "kernels.json", {BF16: 24}
    file.write_text(content)
    keep_most_rows(rows, [BF16], torch.nn.functional.linear, file)
    wait_for_measurement()
    assert rows == {BF16: 4}
    assert json.loads(file.read_text())["rows"] == {str(BF16): 4}


def test_where_ours_are_always_faster_nothing_is_measured(tmp_path: Path) -> None:
    rows = {BF16: UNLIMITED}
    keep_most_rows(rows, [], torch.nn.functional.linear, tmp_path / "kernels.json")
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_while_it_measures_ends_cleanly(tmp_path: Path) -> None:
    script = f"""
import pathlib, torch
from kernels.cpu.crossover import keep_most_rows
keep_most_rows({{}}, [torch.bfloat16], torch.nn.functional.linear, pathlib.Path({str(tmp_path / "kernels.json")!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
