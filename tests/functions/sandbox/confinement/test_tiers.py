"""The layers of confinement, each tested alone: none may cover for another that is missing."""

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.host.faults import Fault
from pilotlight.functions.sandbox.confinement import system, tiers
from pilotlight.functions.sandbox.confinement.confinement import Confinement
from pilotlight.functions.sandbox.confinement.tiers import (
    EXTRA_ADDRESS_SPACE,
    SIGNALS,
    closed_above,
    namespaces,
    top_most,
)
from tests.functions.conftest import Served, ServedMaker

GROUP = 54_321
SOURCE = """
import ctypes, os
from workers import Response, WorkerEntrypoint

def capabilities():
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capget(header, data) == 0
    return list(data)

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        try:
            listed = os.listdir("/")
        except PermissionError:
            listed = None
        return Response.json({"groups": os.getgroups(), "capabilities": capabilities(), "listed": listed})
"""


@pytest.fixture
def in_a_group() -> Iterator[None]:
    """Give this process a supplementary group, as a site started with groups has."""
    before = os.getgroups()
    if os.getuid() == 0:
        os.setgroups([*before, GROUP])
    yield
    if os.getuid() == 0:
        os.setgroups(before)


async def test_no_group_no_capability_and_no_list_of_the_root_is_left_at_tier_2(
    in_a_group: None, served: Served
) -> None:
    served.add(SOURCE)
    found = json.loads(await served.get())
    if os.getuid() == 0:  # another user cannot leave a group
        assert found["groups"] == []
    assert found["capabilities"] == [0] * 6
    assert found["listed"] is None  # the root directory exists, but Landlock forbids to list it


@pytest.mark.skipif(os.getuid() != 0, reason="functions run as the site's own user otherwise")
@pytest.mark.parametrize("tier", [1, 2])
async def test_a_function_runs_from_a_folder_that_is_closed_to_others_and_sees_no_more_than_if_it_were_open(
    tier: int, make_served: ServedMaker
) -> None:
    source = """
        import os, helper
        from workers import Response, WorkerEntrypoint

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                folder = os.path.dirname(os.path.dirname(__file__))
                try:
                    keys = os.listdir(folder + "/.ssh")
                except PermissionError as error:
                    keys = type(error).__name__
                return Response.json([helper.WORD, keys, sorted(os.listdir(folder))])
    """
    async with make_served(tier=tier) as served:
        folder = served.folder / "f"
        (folder / ".ssh").mkdir(parents=True, mode=0o700)
        folder.chmod(0o700)
        served.add(source, python_modules__helper_dot_py="WORD = 'helped'")
        (folder / "python_modules").chmod(0o700)
        found = json.loads(await served.get())
    assert found == ["helped", "PermissionError", [".ssh", "python_modules", "src", "wrangler.toml"]]


@pytest.mark.skipif(os.getuid() != 0, reason="functions run as the site's own user otherwise")
@pytest.mark.parametrize(("closed", "mode"), [("src", 0o700), ("src/entry.py", 0o600)])
@pytest.mark.parametrize("tier", [1, 2])
async def test_a_file_that_the_functions_user_cannot_read_is_named_with_what_to_run(
    tier: int, closed: str, mode: int, make_served: ServedMaker
) -> None:
    async with make_served(tier=tier) as served:
        served.add("from workers import *")
        (served.folder / "f" / closed).chmod(mode)
        with pytest.raises(Fault, match=r"entry\.py cannot be imported: PermissionError.*run chmod -R go\+rX"):
            await served.get()


def limits(tier: int = 2, uid: int | None = 7, **more: Any) -> Confinement:
    fields = {
        "folder": "/f",
        "layers": [],
        "scratch": "/s",
        "memory_mib": 3,
        "disk_mib": 2,
        "open_files": 5,
        "threads": 9,
    }
    return Confinement(tier=tier, uid=uid, **{**fields, **more})


def test_a_process_has_namespaces_of_its_own_from_tier_2_on_and_is_no_root_outside() -> None:
    own = system.CLONE_NEWNS | system.CLONE_NEWPID | system.CLONE_NEWNET
    assert [namespaces(limits(tier, uid)) for tier in (1, 2, 3) for uid in (7, None)] == [
        0, 0, own, own | system.CLONE_NEWUSER, own, own | system.CLONE_NEWUSER,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tier", "uid", "counts_processes"), [(1, None, False), (1, 7, True), (2, None, True), (2, 7, True)]
)
def test_every_limit_is_permanent_and_processes_are_counted_where_they_are_the_functions_alone(
    tier: int, uid: int | None, counts_processes: bool
) -> None:
    assert tiers.resource_limits(limits(tier, uid)) == {
        resource.RLIMIT_DATA: 3 << 20, resource.RLIMIT_AS: (3 << 20) + EXTRA_ADDRESS_SPACE, resource.RLIMIT_FSIZE: 2 << 20,
        resource.RLIMIT_NOFILE: 5, resource.RLIMIT_CORE: 0, resource.RLIMIT_MEMLOCK: 0, resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: SIGNALS, **({resource.RLIMIT_NPROC: 9} if counts_processes else {}),
    }  # fmt: skip


def test_what_python_needs_is_readable_and_whom_the_site_trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/site/authorities.pem")
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    paths = tiers.interpreter.__wrapped__()
    assert "/site/authorities.pem" in paths
    assert {os.path.realpath(os.path.dirname(os.__file__)), "/usr/lib", "/etc/ssl/certs"} <= {*paths}
    assert any(path.endswith("functions/sdk") for path in paths)


def test_a_folder_within_another_is_not_bound_twice_and_one_beside_it_is(tmp_path: Path) -> None:
    for name in ("lib/python", "lib64", "lib/pythonic"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "lib" / "python")
    paths = [str(tmp_path / name) for name in ("lib/python", "lib64", "lib/pythonic", "link", "missing", "lib64")]
    assert sorted(top_most(paths)) == sorted(str(tmp_path / name) for name in ("lib/python", "lib64", "lib/pythonic"))
    assert sorted(top_most([*paths, str(tmp_path / "lib")])) == [str(tmp_path / "lib"), str(tmp_path / "lib64")]
    assert list(top_most(["/", str(tmp_path)])) == ["/"]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yield a folder below folders that all users may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        for path, mode in (("open", 0o711), ("open/lib", 0o755), ("closed", 0o750), ("closed/deep", 0o700)):
            (folder / path).mkdir()
            (folder / path).chmod(mode)
        for path in ("closed/deep/lib", "closed/other", "closed/secret"):
            (folder / path).mkdir()
        yield folder


def test_of_folders_closed_to_others_the_outermost_are_known_and_what_is_needed_in_them(open_folder: Path) -> None:
    assert closed_above([str(open_folder / "open/lib")]) == {}
    needed = [str(open_folder / name) for name in ("open/lib", "closed/deep/lib", "closed/other")]
    (closed,) = closed_above(needed).items()
    assert (closed[0], sorted(closed[1])) == (str(open_folder / "closed"), sorted(needed[1:]))


REVEALING = """
import os, sys
from pilotlight.functions.sandbox.confinement import tiers
folder = sys.argv[1]
before = os.stat("/proc/self/ns/mnt").st_ino
tiers.reveal([f"{folder}/open/lib"])
assert os.stat("/proc/self/ns/mnt").st_ino == before, "nothing is closed, so no namespace is created"
try:
    tiers.reveal([f"{folder}/{name}" for name in ("open/lib", "closed/deep/lib", "closed/other")])
except PermissionError:
    sys.exit(77)
assert os.stat("/proc/self/ns/mnt").st_ino != before
print(sorted(os.listdir(f"{folder}/closed")), os.listdir(f"{folder}/closed/deep"), sorted(os.listdir(folder)))
print(oct(os.stat(f"{folder}/closed").st_mode), oct(os.stat(f"{folder}/closed/deep").st_mode))
"""


@pytest.mark.process
def test_folders_closed_to_others_are_hidden_beyond_their_needed_parts_and_no_others_are(open_folder: Path) -> None:
    command = [sys.executable, "-c", REVEALING, str(open_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 77:
        pytest.skip("this user may not mount anything")
    assert done.stdout.splitlines() == ["['deep', 'other'] ['lib'] ['closed', 'open']", "0o40755 0o40755"], done.stderr
    assert sorted(path.name for path in (open_folder / "closed").iterdir()) == ["deep", "other", "secret"]
