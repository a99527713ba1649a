"""Fixtures of the tests of GGUF files."""

import pytest


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load codes as numbers: products with codes round their input."""
    monkeypatch.setattr("pilotlight.engine.weights.formats.gguf.library.takes_codes", lambda: False)
