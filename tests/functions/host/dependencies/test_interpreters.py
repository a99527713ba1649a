"""The choice of a function's Python, by its project's requirement and the installed versions."""

import logging
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from pilotlight.functions.host.dependencies.interpreters import Interpreters
from pilotlight.functions.host.dependencies.layers import LayerError, Layers, digest_of
from pilotlight.functions.host.dependencies.python_versions import OWN, Interpreter, best, installed, requires_python
from pilotlight.functions.sandbox.zygotes.site_zygote import SiteZygote
from tests.functions.conftest import ServedMaker

FOUND = [Interpreter(f"/py/{version}", version) for version in ("3.11.7", "3.12.1", "3.12.4", "3.13.0", "3.14.0")]
SOURCE = """
import sys
from workers import Response, WorkerEntrypoint
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response.json(sys.version.split()[0])
"""


class NoPackages(Layers):
    async def get(self, requirements: tuple[str, ...], python: Interpreter = OWN) -> Path:
        raise LayerError("no index can be reached")


@pytest.mark.parametrize(
    ("wanted", "version"),
    [(">=3.12", "3.12.4"), (">=3.13", "3.13.0"), ("==3.14.*", "3.14.0"), (">=3.11,<3.12", "3.11.7"), (">=3.15", None)],
)
def test_the_lowest_minor_that_fits_is_chosen_in_its_newest_release(wanted: str, version: str | None) -> None:
    found = best(SpecifierSet(wanted), FOUND)
    assert (found.version if found is not None else None) == version


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ('[project]\nrequires-python = ">=3.12"', ">=3.12"),
        ("[project]\nname = 'x'", None),
        ('[project]\nrequires-python = "new"', None),
        ("[project", None),
        ('project = "x"', None),
    ],
)
def test_what_a_project_asks_for_is_read(tmp_path: Path, text: str, wanted: str | None) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    found = requires_python(tmp_path)
    assert (str(found) if found is not None else None) == wanted


def test_pythons_of_pyenv_and_uv_are_found_by_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("3.12.1", "3.9.1", "system", "pypy3.10-7"):
        (tmp_path / "pyenv/versions" / name / "bin").mkdir(parents=True)
        (tmp_path / "pyenv/versions" / name / "bin/python3").touch()
    (tmp_path / "pyenv/versions/3.13.9/bin").mkdir(parents=True)  # an incomplete installation
    (tmp_path / "uv/cpython-3.13.2-linux-x86_64-gnu/bin").mkdir(parents=True)
    (tmp_path / "uv/cpython-3.13.2-linux-x86_64-gnu/bin/python3").touch()
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [each.version for each in installed()] == ["3.12.1", "3.13.2"]


def test_a_python_that_is_nowhere_is_named_and_the_sites_own_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.99"')
    with caplog.at_level(logging.WARNING, "pilotlight.function"):
        assert Interpreters(SiteZygote(), NoPackages(Path())).wanted_by("f", tmp_path) is None
    assert "f requires Python >=3.99, which is not installed here" in caplog.text
    assert f"the site's own {OWN.version}" in caplog.text


def test_each_python_has_layers_of_its_own() -> None:
    assert digest_of(("a",), FOUND[1]) != digest_of(("a",), FOUND[3])
    assert digest_of(("a",), FOUND[1]) == digest_of(("a",), FOUND[2])
    assert digest_of(("a",)) == digest_of(("a",), OWN)


async def test_a_function_runs_on_another_python_where_there_is_one(
    make_served: ServedMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other Python is a second path to this one.
    Its packages come from a layer, installed from a wheel that the test builds."""
    (fake := tmp_path / "pyenv/versions/3.12.99/bin").mkdir(parents=True)
    (fake / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    asked: list[tuple[tuple[str, ...], str]] = []

    class OwnPackages(Layers):
        async def get(self, requirements: tuple[str, ...], python: Interpreter = OWN) -> Path:
            import msgspec

            asked.append((requirements, python.version))
            return Path(str(msgspec.__file__)).parents[1]

    async with make_served(layers=OwnPackages(Path())) as served:
        served.add(SOURCE, pyproject_dot_toml='[project]\nrequires-python = ">=3.12"')
        assert (await served.get()).decode() == f'"{OWN.version}"'
    assert asked[0] == (("msgspec>=0.19",), "3.12.99")


async def test_a_python_that_cannot_be_given_what_it_needs_is_left_alone(
    make_served: ServedMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (fake := tmp_path / "pyenv/versions/3.12.99/bin").mkdir(parents=True)
    (fake / "python3").symlink_to(sys.executable)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setenv("PATH", str(tmp_path))
    async with make_served(layers=NoPackages(Path())) as served:
        served.add(SOURCE, pyproject_dot_toml='[project]\nrequires-python = ">=3.12"')
        assert (await served.get()).decode() == f'"{OWN.version}"'
    assert "Python 3.12.99 cannot be used: no index can be reached" in caplog.text
