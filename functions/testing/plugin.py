"""The pytest plug-in for authors of functions.

The fixture `worker` serves the function of the nearest folder with a manifest, upwards from the test's file:

    def test_it_greets(worker):
        assert worker.fetch("/hello").text == "Hello"

Without a manifest in the project the plug-in does nothing. It imports late, because every run of pytest loads it where pilotlight is installed.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pilotlight.functions.testing.local_worker import LocalWorker

MANIFESTS = ("wrangler.jsonc", "wrangler.json", "wrangler.toml")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--worker", metavar="FOLDER", help="The function's folder; the nearest one with a manifest by default."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make `workers` importable in a function's tests, unless another module has this name."""
    named = (Path(each.partition("::")[0]).absolute() for each in config.args)
    if any(folder_of(config, each) for each in named) and importlib.util.find_spec("workers") is None:
        sys.path.append(str(Path(__file__).parents[1] / "sdk"))


def folder_of(config: pytest.Config, start: Path) -> Path | None:
    """Return the folder of --worker, or the nearest one with a manifest, from `start` upwards."""
    if (given := config.getoption("--worker", default=None)) is not None:
        return Path(given)
    folders = (start, *start.parents)
    return next((each for each in folders if any((each / name).is_file() for name in MANIFESTS)), None)


@pytest.fixture
def make_worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[Callable[..., LocalWorker]]":
    """Return a factory of workers, which takes the arguments of LocalWorker.
    Each worker serves the project's function, or the one in `directory`, with separate state."""
    from pilotlight.functions.testing.local_worker import LocalWorker

    with ExitStack() as stack:

        def make(directory: Path | None = None, **given: Any) -> LocalWorker:
            folder = directory or folder_of(request.config, request.path)
            if folder is None:
                pytest.fail(f"no folder above {request.path} has a {' or '.join(MANIFESTS)}: name one by --worker")
            state = given.pop("state", None) or tmp_path_factory.mktemp("worker")
            given.setdefault("layers", Path(folder) / ".pilotlight" / "layers")  # those of `pilotlight dev`
            return stack.enter_context(LocalWorker(Path(folder), state, **given))

        yield make


@pytest.fixture
def worker(make_worker: "Callable[..., LocalWorker]") -> "LocalWorker":
    """Return the project's function, served with empty bindings."""
    return make_worker()
