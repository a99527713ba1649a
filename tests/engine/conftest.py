"""Fixtures that fix the arithmetic of a CPU: tests compute through the C library unless they ask for torch too. The library is loaded first, since
results would change if it appeared during a test.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.engine.core.rates import TransferRate
from pilotlight.kernels.cpu import library
from tests.cpu_kernels import BOTH, computing_with, computing_without_codes


@pytest.fixture(scope="session", autouse=True)
def _the_c_library_is_there_from_the_beginning() -> None:
    library.start(wait=True)


@pytest.fixture(scope="module", params=BOTH)
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    with computing_with(request.param):
        yield request.param


@pytest.fixture
def unpacked() -> Iterator[None]:
    """Load codes as numbers: products with codes round their input."""
    with computing_without_codes():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.checkpoints import write_llama  # here, as it imports transformers

    directory = tmp_path_factory.mktemp("llama")
    write_llama(directory)
    return directory


def make_transfers_pay(patch: pytest.MonkeyPatch) -> None:
    """Let every transfer count as cheaper than computing, which otherwise depends on the machine's speed."""
    patch.setattr(TransferRate, "is_worth_it", lambda *_: True)


@pytest.fixture
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every transfer worth it, which otherwise depends on the machine's speed."""
    make_transfers_pay(monkeypatch)


@pytest.fixture
def kept_at(tmp_path: Path) -> Path:
    """Return a path for the file that holds a model's weights in memory."""
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory" / "tiny.weights"
