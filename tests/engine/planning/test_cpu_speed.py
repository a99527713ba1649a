"""The CPU that a plan is made for has the speeds of this machine."""

import pytest
import torch

from pilotlight.engine.planning.cpu_speed import measured_cpu
from pilotlight.engine.planning.devices import cpu


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_speeds_of_this_machine_are_measured(dtype: torch.dtype) -> None:
    device = measured_cpu(dtype)
    assert 1e8 < device.bytes_per_s < 1e13
    assert 1e8 < device.flop_per_s < 1e15
    assert device._replace(bytes_per_s=0, flop_per_s=0, source="") == cpu(0, 0, "")
    assert "this machine" in device.source
