"""12-bit weights are used if they are faster for one row and not slower for more; the measurement is stored."""

import json
from pathlib import Path

import pytest

from pilotlight.kernels.matrices.lossless_speed import LosslessSpeed

pytestmark = pytest.mark.cpu_only


@pytest.fixture(autouse=True)
def arithmetic() -> str:
    """Run each test once: nothing is computed."""
    return "none"


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
    gains: dict[int, float], is_faster: bool, tmp_path: Path
) -> None:
    speed = LosslessSpeed(tmp_path / "library.lossless.json", lambda rows: gains.get(rows, 1.0))
    assert speed.known() is None
    assert speed.measure() == is_faster
    assert speed.known() == is_faster


def test_what_was_measured_in_other_circumstances_or_is_damaged_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "library.lossless.json"
    speed = LosslessSpeed(file, lambda rows: 1.5)
    assert speed.measure()
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"of": [*kept["of"], "another"]}))
    assert speed.known() is None
    for damaged in ("", "[]", "{}"):
        file.write_text(damaged)
        assert speed.known() is None
