"""12-bit weights are used if they are faster for one row and not slower for more; the measurement is stored."""

import json
from pathlib import Path

import pytest

from pilotlight.kernels.matrices import lossless_speed

pytestmark = pytest.mark.cpu_only


@pytest.fixture(autouse=True)
def arithmetic() -> str:
    """Run each test once: nothing is computed."""
    return "none"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "library.lossless.json"
    monkeypatch.setattr(lossless_speed, "_file", lambda: made)
    monkeypatch.setattr(lossless_speed, "_weights", lambda: ("plain", "coded"))
    return made


@pytest.mark.parametrize(
    ("gains", "is_faster"),
    [
        ({1: 1.3, 4: 1.2, 16: 1.1, 64: 1.0}, True),
        ({1: 1.06, 4: 0.981, 16: 0.981, 64: 0.981}, True),
        ({1: 1.3, 4: 1.2, 16: 1.1, 64: 0.97}, False),
        ({1: 1.3, 512: 0.9}, False),  # slower for a prompt
        ({1: 1.3, 1024: 0.9}, False),
        ({1: 1.02, 4: 1.2, 16: 1.1, 64: 1.0}, False),
    ],
)
def test_they_are_faster_if_one_row_gains_and_no_batch_loses(
    gains: dict[int, float], is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless_speed, "_gain", lambda rows, plain, coded: gains.get(rows, 1.0))
    assert lossless_speed.known() is None
    assert lossless_speed.measure() == is_faster
    assert lossless_speed.known() == is_faster


def test_what_was_measured_in_other_circumstances_or_is_damaged_is_unknown(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lossless_speed, "_gain", lambda *_: 1.5)
    assert lossless_speed.measure()
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"of": [*kept["of"], "another"]}))
    assert lossless_speed.known() is None
    for damaged in ("", "[]", "{}"):
        file.write_text(damaged)
        assert lossless_speed.known() is None
