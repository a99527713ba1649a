"""The OCI runtime's processes: awaited without blocking, and without leaks."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pilotlight.functions.sandbox.confinement import tiers
from pilotlight.functions.sandbox.confinement.confinement import Confinement
from pilotlight.functions.sandbox.confinement.oci import INSIDE, container_config, exit_of, write_bundle

LIMITS = Confinement(3, "/function", ["/layer"], "/scratch", 1234, 64, 16, 99, 7, 3)


def child() -> subprocess.Popen[bytes]:
    """Start a child process that ends when its standard input closes."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def is_known(pid: int) -> bool:
    """Tell whether the kernel still knows a process, at least its exit status."""
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.process
@pytest.mark.parametrize("is_left", [False, True])
async def test_a_child_is_waited_for_beside_others_and_leaves_no_descriptor(is_left: bool) -> None:
    started = child()
    assert started.stdin is not None
    before = len(os.listdir("/proc/self/fd"))
    waiting = asyncio.create_task(exit_of(started.pid))
    await asyncio.sleep(0)
    assert not waiting.done()
    if is_left:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(os.listdir("/proc/self/fd")) == before
        started.stdin.close()
    else:
        started.stdin.close()
        await asyncio.wait_for(waiting, 60)
        assert len(os.listdir("/proc/self/fd")) == before - 1, "only the child's input was closed"
        assert not is_known(started.pid)
    started.wait()


def test_a_bundle_can_be_read_by_its_functions_user_whatever_the_sites_own_umask_is(tmp_path: Path) -> None:
    limits = LIMITS
    before = os.umask(0o077)
    try:
        write_bundle(tmp_path / "bundle", "pilotlight-1", limits)
    finally:
        os.umask(before)
    assert (tmp_path / "bundle/rootfs").stat().st_mode & 0o777 == 0o755
    for path in (*tiers.interpreter(), "/bin"):
        if os.path.islink(path):
            assert os.readlink(tmp_path / "bundle/rootfs" / path[1:]) == os.readlink(path)
    assert json.loads((tmp_path / "bundle/config.json").read_text()) == container_config("pilotlight-1", limits)


def test_a_container_may_do_no_more_than_its_function() -> None:
    config = container_config("pilotlight-1", LIMITS)
    process, linux = config["process"], config["linux"]
    assert config["root"]["readonly"]
    assert (process["user"], process["noNewPrivileges"]) == ({"uid": 1234, "gid": 1234}, True)
    assert not any(process["capabilities"].values())
    assert len(process["capabilities"]) == 5
    assert {each["type"] for each in linux["namespaces"]} >= {"pid", "network", "ipc", "mount"}
    resources = linux["resources"]
    assert resources["devices"] == [{"allow": False, "access": "rwm"}]
    assert (64 * 3 + 16) << 20 < resources["memory"]["limit"] <= (64 * 3 + 16 + 128) << 20
    assert resources["pids"]["limit"] == 7 * 3 + 1, "7 threads for each of three isolates, and the zygote"
    (rule,) = linux["seccomp"]["syscalls"]
    assert rule["action"] == "SCMP_ACT_ERRNO"
    assert {"mount", "ptrace", "bpf"} <= {*rule["names"]}


@pytest.mark.process
def test_a_container_has_all_modules_that_its_zygote_imports(tmp_path: Path) -> None:
    config = container_config("pilotlight-1", Confinement(3, str(tmp_path), [], "/scratch", None, 64, 16, 99, 7, 3))
    for mount in config["mounts"]:
        if mount["destination"].startswith(INSIDE):
            (link := tmp_path / mount["destination"][1:]).parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(mount["source"])
    *command, code = config["process"]["args"]
    imports = code.replace(INSIDE, f"{tmp_path}{INSIDE}").removesuffix("; contained()")
    done = subprocess.run([*command, imports], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_container_sees_its_function_and_cannot_write_there(tmp_path: Path) -> None:
    (folder := tmp_path / "function").mkdir()
    (layer := tmp_path / "layer").mkdir()
    limits = Confinement(3, str(folder), [str(layer)], str(tmp_path / "scratch"), 1234, 64, 16, 99, 7, 3)
    mounts = {each["destination"]: each for each in container_config("pilotlight-1", limits)["mounts"]}
    for path in (str(folder), str(layer)):
        assert mounts[path]["source"] == path
    bound = [each for each in mounts.values() if each["type"] == "bind"]
    assert all({"ro", "nosuid", "nodev"} <= {*each["options"]} for each in bound)
    assert "size=16m" in mounts["/tmp"]["options"]
    assert not any(each["source"] in ("/", "/etc", "/home", "/root", limits.scratch) for each in bound)
