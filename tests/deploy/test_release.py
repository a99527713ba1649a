"""Versions, wheel tags and checksums of a release."""

import base64
import hashlib
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from deploy import release

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.process


def recorded(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"sha256={digest},{len(data)}"


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1.2.0"\nrequires-python = ">=3.11"\n')
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "First")
    return tmp_path


def test_the_version_is_the_tags_and_between_tags_says_what_follows(repository: Path) -> None:
    assert re.fullmatch(r"1\.2\.0\.dev1\+g[0-9a-f]+", release.version_of(repository))
    git(repository, "tag", "v1.2.0")
    assert release.version_of(repository) == "1.2.0"
    git(repository, "commit", "--allow-empty", "-qm", "More")
    assert re.fullmatch(r"1\.2\.0\.dev1\+g[0-9a-f]+", release.version_of(repository))


def test_a_tree_without_a_history_has_its_projects_version(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('version = "3.0.0"\n')
    assert release.version_of(tmp_path) == "3.0.0"
    release.set_version(tmp_path / "pyproject.toml", "3.0.1")
    assert (tmp_path / "pyproject.toml").read_text() == 'version = "3.0.1"\n'


def test_a_wheels_tag_names_the_glibc_that_its_libraries_need(tmp_path: Path) -> None:
    (folder := tmp_path / "kernels/cpu/shipped").mkdir(parents=True)
    (folder / "a.so").write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.34\0")
    (folder / "b.so").write_bytes(b"\0GLIBC_2.17\0")
    assert release.newest_glibc(tmp_path) == "2_34"


def test_a_wheel_is_tagged_for_its_platform_and_any_python(tmp_path: Path) -> None:
    wheel = tmp_path / "x-1.0-py3-none-any.whl"
    info = "x-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        record = "".join(f"{name},{recorded(archive.read(name))}\n" for name in archive.namelist())
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    assert release.retag(wheel, "manylinux_2_34_x86_64").name == "x-1.0-py3-none-manylinux_2_34_x86_64.whl"


def test_sums_are_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"b")
    (tmp_path / "a").write_bytes(b"a")
    release.write_sums(tmp_path)
    expected = "".join(f"{hashlib.sha256(name.encode()).hexdigest()}  {name}\n" for name in "ab")
    assert (tmp_path / "SHA256SUMS").read_text() == expected
