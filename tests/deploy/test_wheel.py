"""The product as users install it: a wheel with one top-level package, used outside a checkout, beside packages of similar names."""

import json
import os
import shutil
import site
import subprocess
import sys
import time
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from load_tests.local_network import free_ports

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "results", "tests", "docs", "runs")
OUTSIDE = {
    name: value for name, value in os.environ.items() if name != "PYTHONPATH"
}  # not of a checkout that is named there
QUESTION = {"model": "ember", "messages": [{"role": "user", "content": "What is the airport code of Lisbon?"}]}

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(600)]  # builds a wheel, installs from PyPI


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=LEFT_OUT)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(folder / "tree")]
    subprocess.run(command, check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the wheel and the package `kernels` of Hugging Face.

    The dependencies of both come from the environment of the tests.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    for package in (str(wheel), "kernels"):
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", package], check=True, cwd=folder)
    return python


def run(python: Path, code: str, folder: Path) -> str:
    done = subprocess.run([python, "-c", code], cwd=folder, env=OUTSIDE, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"pilotlight"}


def test_none_of_our_folders_can_be_imported_by_its_bare_name(python: Path, tmp_path: Path) -> None:
    for name in ("engine", "edge_router", "wire", "functions", "load_tests", "tests"):
        assert run(python, f"import {name}", tmp_path) == f"ModuleNotFoundError: No module named '{name}'"


def test_kernels_of_hugging_face_and_ours_stand_beside_each_other(python: Path, tmp_path: Path) -> None:
    assert run(python, "import kernels; print(callable(kernels.get_kernel))", tmp_path) == "True"
    assert run(python, "import transformers, pilotlight.kernels.sampling.sample; print('both')", tmp_path) == "both"
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "kernels"], check=True)
    assert run(python, "import pilotlight.kernels.sampling.sample; print('there')", tmp_path) == "there"


@contextmanager
def started(python: Path, folder: Path, *arguments: str) -> Iterator[None]:
    environment = {**OUTSIDE, "HOME": str(folder), "XDG_STATE_HOME": str(folder / "state")}
    command = [str(python.parent / "pilotlight"), *arguments]
    with open(folder / "output", "w") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def answer(url: str, body: object | None, folder: Path) -> bytes:
    """Send a request, again until the process listens; return the response body."""
    data = None if body is None else json.dumps(body).encode()
    deadline = time.monotonic() + 120
    while True:
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                found: bytes = response.read()
                return found
        except OSError:
            assert time.monotonic() < deadline, (folder / "output").read_text()
            time.sleep(0.2)


def test_a_network_runs_from_any_folder(python: Path, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    with started(python, tmp_path, "up", "--port", str(port)):
        found = json.loads(answer(f"http://127.0.0.1:{port}/v1/chat/completions", QUESTION, tmp_path))
        assert "LIS" in found["choices"][0]["message"]["content"]


def test_a_function_runs_from_any_folder(python: Path, tmp_path: Path) -> None:
    command = [python.parent / "pilotlight", "init", "hello"]
    subprocess.run(command, cwd=tmp_path, env=OUTSIDE, check=True, capture_output=True)
    port = free_ports(1)[0]
    with started(python, tmp_path, "dev", "hello", "--port", str(port)):
        assert answer(f"http://127.0.0.1:{port}/fn/hello/", None, tmp_path)
