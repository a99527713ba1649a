"""The pytest plug-in for authors of functions.

`worker` serves the function of the folder in which a test's project lies.

    def test_it_greets(worker):
        assert worker.fetch("/hello").text == "Hello"

Without a manifest in the project it does nothing. Imports what it needs when a fixture is used: every run of pytest beside an installed pilotlight
loads it.
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
    """Let tests of a function import `workers` as the function does, unless another module has this name."""
    if folder_of(config) is not None and importlib.util.find_spec("workers") is None:
        sys.path.append(str(Path(__file__).parents[1] / "sdk"))


def folder_of(config: pytest.Config) -> Path | None:
    """Return the function's folder, or None if the project has none."""
    if (given := config.getoption("--worker", default=None)) is not None:
        return Path(given)
    root = config.rootpath
    return next((each for each in (root, *root.parents) if any((each / name).is_file() for name in MANIFESTS)), None)


@pytest.fixture
def make_worker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> "Iterator[Callable[..., LocalWorker]]":
    """Serve the function, or that of another `directory`, each with separate state.

    The arguments are those of LocalWorker.
    """
    from pilotlight.functions.testing.local_worker import LocalWorker

    with ExitStack() as stack:

        def make(directory: Path | None = None, **given: Any) -> LocalWorker:
            folder = directory or folder_of(request.config)
            if folder is None:
                pytest.fail(
                    f"no folder above {request.config.rootpath} has a {' or '.join(MANIFESTS)}: name one by --worker"
                )
            state = given.pop("state", None) or tmp_path_factory.mktemp("worker")
            if "layers" not in given:  # a function's packages are installed once in a run
                given["layers"] = tmp_path_factory.getbasetemp() / "worker-layers"
                given["layers"].mkdir(exist_ok=True)
            return stack.enter_context(LocalWorker(Path(folder), state, **given))

        yield make


@pytest.fixture
def worker(make_worker: "Callable[..., LocalWorker]") -> "LocalWorker":
    """The function, with empty bindings."""
    return make_worker()
