"""What is taken from a process before it runs somebody's code, each layer by itself: none may stand in for another that is missing."""

import json
import os
from collections.abc import Iterator

import pytest

from tests.runtime.functions.conftest import Served

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
    """As a site that was started with supplementary groups."""
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
    if os.getuid() == 0:  # another user has none that it could leave
        assert found["groups"] == []
    assert found["capabilities"] == [0] * 6
    assert found["listed"] is None  # the root is there, and Landlock alone says that it is not for reading
