"""The benchmark of kernels times only correct calls, with arguments that no cache holds, and compares with measured ceilings."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from load_tests import kernel_speed
from load_tests.catalogue import OPERATIONS
from load_tests.catalogue.norms import ADD_RMS_NORM, RMS_NORM
from load_tests.catalogue.operation import Case, Cost, Operation, Target
from load_tests.ceilings import Ceilings
from load_tests.kernel_speed import WrongError, checked, held_against, measure, num_copies, storage_type
from load_tests.scenarios import kernels as scenario
from load_tests.tables.kernels import OURS
from load_tests.timing import Budget, Contender, take_turns

CPU = torch.device("cpu")
LIMITS = {"read_gb_per_s": 10.0, "copy_gb_per_s": 8.0, "fp32_tflop_per_s": 0.1}


def numbers(dtype: torch.dtype) -> dict[str, Any]:
    return {"x": torch.randn(40, 6).to(dtype)}


def doubling(function: Any = lambda x: 2 * x, **changed: Any) -> Operation:
    case = Case("40 x 6", numbers)
    operation = Operation(
        name="double", function=function, triton="", reference=lambda x: 2 * x, roundings=1, cases=(case,), bench=(case,),
        cost=lambda arguments: Cost(2 * arguments["x"].nbytes),
    )  # fmt: skip
    return replace(operation, **changed)


def test_a_right_call_is_timed_beside_its_rivals() -> None:
    operation = doubling(rivals={"torch": lambda x: x + x, "unknown": lambda x: cast("Any", torch).no_such_thing(x)})
    row = measure(operation, operation.bench[0], CPU, LIMITS, share_s=0.0)
    assert row["forms"].keys() == {OURS, "torch"}
    assert row["forms"][OURS]["n"] >= 3
    assert row["absent"].keys() == {"unknown"}
    assert row["bytes"] == 2 * 40 * 6 * 4
    assert row["predicted_us"] == pytest.approx(1920 / 8e3)
    assert row["share_of_floor"] == pytest.approx(row["predicted_us"] / row["forms"][OURS]["us"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: 2.001 * x, r"result 0 is 0.0005 off, 5.96e-08 is explained"),
        (lambda x: torch.full_like(x, torch.nan), "off, "),
        (lambda x: torch.cat((2 * x[:-1], x[-1:])), "off, "),
        (lambda x: 2 * x[:-1], "has shape"),
        (lambda x: (2 * x, x), "gives"),
    ],
)
@pytest.mark.parametrize("rows", [(), ("x",)])
def test_a_wrong_call_is_not_timed(
    function: Any, message: str, rows: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernel_speed.PART, "cpu", 50)
    with pytest.raises(WrongError, match=message):
        checked(doubling(function, rows=rows), numbers(torch.float32), torch.float32)


def test_a_large_call_is_checked_in_parts_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def reference(x: torch.Tensor, **others: Any) -> Any:
        seen.append(len(x))
        return ADD_RMS_NORM.reference(x, **others)

    arguments = ADD_RMS_NORM.bench[0].make(torch.float32)
    whole = checked(ADD_RMS_NORM, arguments, torch.float32)
    monkeypatch.setitem(kernel_speed.PART, "cpu", 1 << 17)
    parts = checked(replace(ADD_RMS_NORM, reference=reference), arguments, torch.float32)
    assert sum(seen) == len(arguments["x"])
    assert len(seen) > 1
    assert 0 < whole <= parts


def test_what_a_call_changes_is_checked_from_what_it_was_before() -> None:
    def add_(x: torch.Tensor) -> None:
        x += 1

    right = doubling(add_, reference=add_, changes=("x",))
    assert checked(right, numbers(torch.float32), torch.float32) <= 1
    with pytest.raises(WrongError):
        checked(doubling(lambda x: None, reference=add_, changes=("x",)), numbers(torch.float32), torch.float32)


def test_copies_of_the_arguments_exceed_the_cache_twice_over() -> None:
    megabyte = {"x": torch.zeros(1 << 18)}
    assert num_copies(megabyte, CPU) * (1 << 20) >= 2 * kernel_speed.CPU_CACHE
    assert num_copies({"x": torch.zeros(1 << 26)}, CPU) == 2


@pytest.mark.parametrize(
    ("target", "met", "reached"),
    [
        (Target(0.5, "copy"), True, 0.625),
        (Target(0.7, "copy"), False, 0.625),
        (Target(0.51, "read"), False, 0.5),
        (Target(0.2, "matmul"), True, 0.2),
        (Target(1.5, "rival"), True, 1.5),
        (Target(1.6, "rival"), False, 1.5),
        (Target(us=99.0), False, None),
        (Target(us=100.0), True, None),
        (None, None, None),
    ],
)
def test_a_target_is_met_or_missed(target: Target | None, met: bool | None, reached: float | None) -> None:
    cost, times = Cost(bytes=500_000, flops=2_000_000), {OURS: 100.0, "torch": 150.0, "slow": 900.0}
    row = held_against(cost, target, times, LIMITS, torch.float32)
    assert row.get("met") == met
    assert row.get("share_reached") == (None if reached is None else pytest.approx(reached))
    if target is None or target.of == "copy":
        assert row["predicted_us"] == pytest.approx(62.5)
        assert row["bound"] == "memory"


def test_a_target_against_a_rival_that_is_not_here_is_neither_met_nor_missed() -> None:
    row = held_against(Cost(8), Target(0.9, "rival"), {OURS: 1.0}, LIMITS, torch.float32)
    assert row["met"] is None
    assert row["share_reached"] is None
    assert not any(isinstance(value, float) and math.isnan(value) for value in row.values())


def test_late_jobs_repeat_less_but_never_not_at_all() -> None:
    assert Budget(-1.0, 3).next_share_s() == 0.0
    calls = []
    timed = take_turns({"one": Contender(CPU, [lambda: calls.append(1)])}, share_s=0.0, most=9, least=4)
    assert len(timed["one"].times_s) == 4
    assert len(calls) == 5  # one is a warm-up


@pytest.mark.process
def test_the_scenario_shows_every_call_and_writes_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = doubling(lambda x: 3 * x, name="triple")
    monkeypatch.setenv("OUT", str(tmp_path))
    assert scenario.run(CPU, 0.5, math.inf, known=(RMS_NORM, wrong), ceilings_of=Fixed) == 1
    *_, before_last, last, place = capsys.readouterr().out.splitlines()
    assert last == f"{len(RMS_NORM.cases) + 1} calls, 1 failed; 0 of 0 targets met"
    assert before_last.startswith("triple")
    assert "WRONG: result 0 is" in before_last
    (record,) = tmp_path.glob("*-kernels.json")
    assert str(record) in place
    rows = json.loads(record.read_text())["results"]["rows"]
    assert [row["operation"] for row in rows] == ["rms_norm"] * len(RMS_NORM.cases) + ["triple"]
    assert all(row["predicted_us"] >= 0 for row in rows[:-1])


def test_each_row_is_in_the_record_before_the_next_call_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[int] = []

    def looking(x: torch.Tensor) -> torch.Tensor:
        recorded.extend(
            len(json.loads(file.read_text())["results"]["rows"]) for file in tmp_path.glob("*-kernels.json")
        )
        return 2 * x

    monkeypatch.setenv("OUT", str(tmp_path))
    assert scenario.run(CPU, 0.0, math.inf, known=(doubling(), doubling(looking)), ceilings_of=Fixed) == 0
    assert set(recorded) == {1}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_case_has_a_cost(operation: Operation) -> None:
    for case in operation.cases:
        assert operation.cost(case.make(storage_type(operation, CPU))).bytes >= 0


def test_a_rehearsal_takes_operations_that_no_cpu_has_a_ceiling_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert scenario.run(CPU, 0.0, math.inf, only=["fp8_linear"], ceilings_of=Fixed) == 0


def test_what_is_not_reached_in_time_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert scenario.run(CPU, 0.0, -1.0, only=["rms_norm"], ceilings_of=Fixed) == 1
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("rms_norm")]
    assert len(rows) == len(RMS_NORM.cases)
    assert all(row.endswith("not reached in time") for row in rows)


class Fixed(Ceilings):
    """Ceilings that are known and not measured."""

    def __init__(self, *arguments: Any) -> None: ...

    def measure(self) -> "Fixed":
        return self

    def summary(self) -> dict[str, float]:
        return LIMITS
