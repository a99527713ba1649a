"""Every operation is tested twice on a CPU, by the C library and by torch; `make gpu-check` runs these tests with their tensors on a GPU: whatever a
test makes lands on the default device."""

import os
from collections.abc import Iterator

import pytest
import torch

from tests.cpu_kernels import BOTH, computing_with

DEVICE = os.environ.get("PILOTLIGHT_TEST_DEVICE", "cpu")

# torch notes what makes tensors when a default device is first used, and knows a function no longer that a test has replaced by then.
with torch.device("cpu"):
    torch.empty(0)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


@pytest.fixture(autouse=True)
def _tensors_on_the_device_under_test() -> Iterator[None]:
    torch.manual_seed(5)  # what tests draw is the same in every run
    with torch.device(DEVICE):
        yield


@pytest.fixture(autouse=True, params=BOTH if DEVICE == "cpu" else ["torch"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    with computing_with(request.param):
        yield request.param
