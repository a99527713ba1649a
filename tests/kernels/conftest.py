"""`make gpu-check` runs these tests with their tensors on a GPU: whatever a test makes lands on the default device."""

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _tensors_on_the_device_under_test() -> Iterator[None]:
    with torch.device(os.environ.get("PILOTLIGHT_TEST_DEVICE", "cpu")):
        yield
