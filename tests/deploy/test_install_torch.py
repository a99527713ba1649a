"""The installer of torch prefers a CPU build, within the project's range of versions."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "deploy"))
import install_torch  # noqa: E402


def test_the_range_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["torch"] == [f"torch{install_torch.RANGE}"]
    assert not [each for each in project["dependencies"] if each.startswith("torch")], (
        "pip would install gigabytes of CUDA"
    )


@pytest.mark.parametrize(
    "file", ["README.md", "docs/operating.md", "runtime/serve.py", "runtime/cli/operations/doctor.py"]
)
def test_a_user_is_told_to_install_the_projects_range(file: str) -> None:
    told = re.findall(r"pip install '?torch(\S*?)['` ]", (ROOT / file).read_text())
    assert told
    assert set(told) == {install_torch.RANGE}


def test_an_offered_cpu_build_of_the_pinned_version_is_taken() -> None:
    assert install_torch.cpu_build(["2.15.0", "2.13.1+cpu", "2.13.0+cpu", "2.13.0"]) == "2.13.0+cpu"


def test_otherwise_the_newest_cpu_build_within_the_range() -> None:
    assert install_torch.cpu_build(["2.14.0+cpu", "2.11.0+cpu", "2.12.1+cpu", "2.9.0+cpu"]) == "2.12.1+cpu"


def test_a_cuda_build_is_never_mistaken_for_a_cpu_build() -> None:
    assert install_torch.cpu_build(["2.13.0", "2.13.0+cu130", "2.12.1"]) is None
