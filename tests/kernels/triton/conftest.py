"""The C library has no part in these tests: one run of each is enough. What they compile for Hopper is kept from run
to run, as Triton keeps it: by what it was compiled from."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def arithmetic() -> str:
    return "triton"


@pytest.fixture
def compiled(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Triton's cache; pytest's own has it where there is one."""
    cache: pytest.Cache | None = getattr(request.config, "cache", None)
    return cache.mkdir("triton") if cache is not None else tmp_path
