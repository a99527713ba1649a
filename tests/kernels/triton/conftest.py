"""The C library has no part in these tests: one run of each is enough."""

import pytest


@pytest.fixture(autouse=True)
def arithmetic() -> str:
    return "triton"
