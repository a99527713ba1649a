"""The watch over all functions of a site: an error for one does not affect the limits of others."""

import logging

import pytest

from pilotlight.functions.host.faults import Fault
from tests.functions.conftest import ServedMaker

BLOCKS = """
import time
from workers import *

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        time.sleep(600)
"""


async def test_limits_of_others_hold_when_one_functions_use_cannot_be_recorded(
    make_served: ServedMaker, caplog: pytest.LogCaptureFixture
) -> None:
    def on_cpu(function: str, seconds: float) -> None:
        if function == "f":
            raise OSError("the disk is full")

    async with make_served(tier=1, limits={"blocked_s": 0.2, "wall_s": 60.0}, on_cpu=on_cpu) as served:
        for name in ("f", "g"):
            served.add(BLOCKS, name)
            with pytest.raises(Fault) as fault:
                await served.ask(name=name)
            assert fault.value.code == "blocked"
    told = [record for record in caplog.records if record.levelno >= logging.ERROR and "watched" in record.message]
    assert [record.getMessage() for record in told] == ["f: its limits cannot be watched"]
