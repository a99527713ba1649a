"""The limits above which torch computes products are measured once, if its library has features that ours lacks, and stored."""

import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.prefill_attention import prefill_attention
from pilotlight.kernels.attention.prefill_by_torch import attend_by_torch
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.cpu import crossover, library, ops
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.cpu.crossover import UNLIMITED, Forms, Limits, keep_limits
from tests.cpu_kernels import C_LIBRARY, computing_with

BF16 = torch.bfloat16
pytestmark = pytest.mark.cpu_only


def slow_from(rows: int) -> int:
    return crossover.crossover((1, 2, 4, 8, 16, 32), lambda n: 2.0 if n >= rows else 0.5)


def test_ours_are_used_up_to_the_first_number_of_rows_at_which_torchs_is_faster() -> None:
    assert slow_from(16) == 8
    assert slow_from(1) == 0
    assert slow_from(10**6) == UNLIMITED
    assert crossover.crossover((1, 2), lambda n: 1.1) == UNLIMITED, "recording a step saves more"


def test_a_win_by_chance_is_not_believed() -> None:
    """Torch may seem faster by chance on a busy machine, and the limit is stored permanently."""
    chances = iter([0.5, 2.0, 2.0, 0.5, 2.0, 2.0, 2.0, 2.0])
    assert crossover.crossover((1, 2, 4), lambda n: next(chances)) == 2


def test_a_machine_that_is_busy_for_a_while_is_no_reason_to_choose_either() -> None:
    """Other work makes everything ten times as slow, from before the first until after the third call."""
    now, calls = 0.0, 0

    def work(duration_s: float) -> None:
        nonlocal now, calls
        calls += 1
        now += duration_s * (10 if calls <= 3 else 1)

    relative = crossover.relative_time(lambda: work(1.0), lambda: work(2.0), clock=lambda: now)
    assert relative == pytest.approx(0.5)


def wait_for_measurement() -> None:
    for thread in threading.enumerate():
        if thread.name == "cpu-crossover":
            thread.join()


def unmeasured() -> Limits:
    return Limits({BF16: 24}, {BF16: UNLIMITED})


class Measured:
    """A measurement that reports `most` rows and queries, after `begin`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.calls = 0
        self.begin = threading.Event()
        self.begin.set()

    def __call__(self, dtype: torch.dtype) -> tuple[int, int]:
        self.begin.wait()
        self.calls += 1
        return self.most, self.most


def test_what_was_measured_is_found_again_by_the_next_process(tmp_path: Path) -> None:
    measured = Measured(8)
    file, limits = tmp_path / "kernels.json", unmeasured()
    keep_limits(limits, [BF16], measured, file)
    wait_for_measurement()
    assert limits == Limits({BF16: 8}, {BF16: 8})
    assert measured.calls == 1
    again = unmeasured()
    keep_limits(again, [BF16], measured, file)
    assert again == limits
    assert measured.calls == 1


def test_of_hosts_that_start_together_one_measures(tmp_path: Path) -> None:
    measured = Measured(8)
    measured.begin.clear()
    file, hosts = tmp_path / "kernels.json", [unmeasured(), unmeasured()]
    for limits in hosts:
        keep_limits(limits, [BF16], measured, file)
    measured.begin.set()
    wait_for_measurement()
    assert hosts == [Limits({BF16: 8}, {BF16: 8})] * 2
    assert measured.calls == 1


@pytest.mark.parametrize("content", ["", "[]", '{"of": ["1.0", 2], "rows": {}}'])
def test_a_file_of_other_circumstances_or_none_is_measured_anew(tmp_path: Path, content: str) -> None:
    file, limits = tmp_path / "kernels.json", unmeasured()
    file.write_text(content)
    keep_limits(limits, [BF16], Measured(4), file)
    wait_for_measurement()
    assert limits == Limits({BF16: 4}, {BF16: 4})
    kept = json.loads(file.read_text())
    assert (kept["rows"], kept["queries"]) == ({str(BF16): 4}, {str(BF16): 4})


def test_a_file_without_a_limit_leaves_all_as_they_are_until_it_is_measured(tmp_path: Path) -> None:
    file, limits = tmp_path / "kernels.json", unmeasured()
    keep_limits(unmeasured(), [BF16], Measured(1), file)
    wait_for_measurement()
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({"of": kept["of"], "rows": kept["rows"]}))
    measured = Measured(4)
    measured.begin.clear()
    keep_limits(limits, [BF16], measured, file)
    assert limits == unmeasured()
    measured.begin.set()
    wait_for_measurement()
    assert limits == Limits({BF16: 4}, {BF16: 4})


def test_both_forms_of_attention_compute_what_is_measured() -> None:
    results = []

    def gain(ours: Callable[[], object], torchs: Callable[[], object]) -> float:
        results.append((ours(), torchs()))
        return 1.0

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x

    with computing_with(C_LIBRARY):
        assert library.loaded is not None
        ours = Forms(product, partial(ops.prefill_attention, library.loaded))
        assert crossover.measure(ours, Forms(product, attend_by_torch), BF16, gain) == (UNLIMITED, UNLIMITED)
    attended = [(by_c, by_torch) for by_c, by_torch in results if by_c is not by_torch]
    assert len({len(by_c) for by_c, _ in attended}) > 1, "prompts of several lengths"
    for by_c, by_torch in attended:
        torch.testing.assert_close(by_c, by_torch)


@pytest.mark.parametrize(("queries", "window", "is_torchs"), [(16, None, False), (17, None, True), (17, 8, False)])
def test_a_longer_prompt_than_is_ours_is_left_to_torch(queries: int, window: int | None, is_torchs: bool) -> None:
    q, cache = torch.randn(queries, 4, 64).to(BF16), torch.randn(4, 16, 2, 64).to(BF16)
    starts, contexts = torch.tensor([0, queries], dtype=torch.int32), torch.tensor([40], dtype=torch.int32)
    batch = VarlenBatch(torch.arange(4)[None], starts, contexts, (queries,), (40,))
    args = (q, cache, cache.flip(0), batch, AttentionRule(0.125, window))
    with computing_with(C_LIBRARY):
        assert library.loaded is not None
        whole = prefill_attention(*args)
        limited = Library(library.loaded.path)
    limited.most_queries[BF16] = 16
    assert (ops.prefill_attention(limited, *args) is None) == is_torchs
    with computing_with(limited):
        torch.testing.assert_close(prefill_attention(*args), whole, atol=0.02, rtol=0.02)


def test_where_nothing_is_slow_nothing_is_measured() -> None:
    measured = []
    with computing_with(C_LIBRARY):
        assert library.loaded is not None
        opened = library.open_library(library.loaded.path, keep=lambda *args: measured.append(args))
    assert bool(measured) == bool(opened.slow)
    assert opened.slow or opened.most_queries[BF16] == UNLIMITED


# Ends as soon as the first product is being measured, or at once, and prints how many were started.
ENDING = """
import atexit, pathlib, sys, time, torch
from functools import partial
from pilotlight.kernels.cpu.crossover import Forms, Limits, keep_limits, measure
from pilotlight.kernels.attention.prefill_by_torch import attend_by_torch
started = []
atexit.register(lambda: print(len(started)))
torchs = Forms(lambda *args: started.append(1) or torch.nn.functional.linear(*args), attend_by_torch)
keep_limits(Limits({}, {}), [torch.bfloat16], partial(measure, torchs, torchs), pathlib.Path(sys.argv[1]))
while not started and sys.argv[2:]:
    time.sleep(0.001)
"""


@pytest.mark.process
def test_a_process_that_ends_while_it_measures_ends_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDING, str(tmp_path / "kernels.json"), "measuring"]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 1 <= int(done.stdout) < 12, "the measurement ends with the process, after the call it is in"


@pytest.mark.process
def test_a_process_ends_while_another_one_measures(tmp_path: Path) -> None:
    with (tmp_path / "kernels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-c", ENDING, str(tmp_path / "kernels.json")]
        done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
