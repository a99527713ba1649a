"""A change is tried in a copy, by the tests that are named, and nothing of it is left."""

import subprocess
from collections.abc import Iterator

import pytest

from load_tests.mutation.mirrors import mirrors
from load_tests.mutation.mutant import ROOT, Mutant
from load_tests.mutation.tables import SETS
from load_tests.mutation.trial import Copy, copy_of

SOURCE = "def least(a: int, b: int) -> int:\n    return a if a < b else b\n"
TEST = "from least import least\n\ndef test_least():\n    assert least(1, 2) == 1\n"
TESTS = ("test_least.py",)


@pytest.fixture(autouse=True)
def _plain_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs within these tests need none of the plugins that are installed, whose imports take a second."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    project = tmp_path_factory.mktemp("project")
    for name, text in {"least.py": SOURCE, "test_least.py": TEST, ".gitignore": "secret\n", "secret": ""}.items():
        (project / name).write_text(text)
    (project / "pytest.ini").write_text("[pytest]\nmarkers = slow: none\n")
    subprocess.run(["git", "init", "-q", project], check=True)
    with copy_of(project) as made:
        yield made
    assert not made.folder.exists()
    assert (project / "least.py").read_text() == SOURCE


def test_what_git_ignores_is_not_copied(copy: Copy) -> None:
    assert {path.name for path in copy.folder.iterdir()} == {"least.py", "test_least.py", ".gitignore", "pytest.ini"}


@pytest.mark.parametrize(
    ("old", "new", "outcome", "by"),
    [
        ("a < b", "a > b", "noticed", "test_least.py::test_least"),
        ("a < b", "a <= b", "survived", ""),
        ("no such text", "", "moved", ""),
        ("a", "b", "moved", ""),
        ("a < b", "a <", "no program", ""),
    ],
)
def test_a_change_has_one_outcome_and_is_taken_back(copy: Copy, old: str, new: str, outcome: str, by: str) -> None:
    trial = copy.tried(Mutant("least.py", old, new, "the larger is taken"), TESTS)
    assert (trial.outcome, trial.by) == (outcome, by)
    assert (copy.folder / "least.py").read_text() == SOURCE


def test_every_change_is_of_a_file_that_has_tests() -> None:
    for mutant in (mutant for mutants in SETS.values() for mutant in mutants):
        assert (ROOT / mutant.file).is_file(), mutant
        assert mirrors(mutant.file), mutant
        assert mutant.old != mutant.new
