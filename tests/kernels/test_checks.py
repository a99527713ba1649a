"""Calls like earlier ones are not checked again, and nothing of a call is kept alive."""

import weakref
from typing import Any

import pytest
import torch

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.checks import ArgumentCheck, ArgumentError, PassedCalls
from pilotlight.kernels.matrices.plain import PlainWeight
from tests.kernels.conftest import set_debug_mode


def test_only_calls_of_new_sizes_and_types_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    set_debug_mode(monkeypatch, False)
    calls, checked = PassedCalls(), []

    def check(check: ArgumentCheck, x: torch.Tensor, rule: AttentionRule, weight: PlainWeight, size: int) -> None:
        checked.append(check.operation)
        check.require("x", x.dim() == 2, "has other dimensions")

    def call(x: torch.Tensor, *, operation: str = "one", sinks: Any = None, size: int = 3) -> int:
        calls.check(operation, check, (x, AttentionRule(1.0, sinks=sinks), PlainWeight(torch.zeros(2, size)), size))
        return len(checked)

    assert [call(torch.ones(2, 3)), call(torch.zeros(2, 3))] == [1, 1]
    assert call(torch.ones(2, 3), operation="other") == 2
    assert call(torch.ones(3, 2).T) == 3
    assert call(torch.ones(2, 3).double()) == 4
    assert call(torch.ones(2, 3, device="meta")) == 5
    assert call(torch.ones(2, 3), sinks=torch.ones(2)) == 6
    assert call(torch.ones(2, 3), size=4) == 7
    for _ in range(2):
        with pytest.raises(ArgumentError, match="one: x has other dimensions"):
            call(torch.ones(3))


def test_the_tensors_of_a_call_are_not_kept() -> None:
    calls, weight = PassedCalls(), PlainWeight(torch.zeros(2, 2))
    calls.check("one", lambda *_: None, (weight.values, weight))
    seen = weakref.ref(weight.values)
    del weight
    assert seen() is None
