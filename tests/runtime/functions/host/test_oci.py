"""Processes of an OCI runtime: waited for without being in the way, and leaving nothing open."""

import asyncio
import os
import subprocess
import sys

import pytest

from runtime.functions.host.oci import _exit_of


def child() -> subprocess.Popen[bytes]:
    """Return one that ends when its input does."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def is_known(pid: int) -> bool:
    """Tell whether the kernel keeps a process, or what became of it, for who started it."""
    return os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_child_is_waited_for_beside_others_and_leaves_no_descriptor(is_left: bool) -> None:
    started = child()
    assert started.stdin is not None
    before = len(os.listdir("/proc/self/fd"))
    waiting = asyncio.create_task(_exit_of(started.pid))
    await asyncio.sleep(0)
    assert not waiting.done()
    if is_left:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(os.listdir("/proc/self/fd")) == before
        started.stdin.close()
    else:
        started.stdin.close()
        await asyncio.wait_for(waiting, 20)
        assert len(os.listdir("/proc/self/fd")) == before - 1, "its input alone"
        assert not is_known(started.pid)
    started.wait()
