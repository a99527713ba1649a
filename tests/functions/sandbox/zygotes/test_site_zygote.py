"""The process from which functions' zygotes are forked: if it has died, it is restarted on demand."""

import asyncio
import os
from pathlib import Path

import pytest

from pilotlight.functions.sandbox.confinement.confinement import Confinement
from pilotlight.functions.sandbox.zygotes.site_zygote import SiteZygote

pytestmark = pytest.mark.process


async def test_one_that_has_died_is_started_again_for_the_next_function(tmp_path: Path) -> None:
    limits = Confinement(1, str(tmp_path), [], str(tmp_path), None, 256, 16, 64, 16)
    zygote = SiteZygote()
    zygote.start()
    for _ in range(2):
        log = os.open("/dev/null", os.O_WRONLY)
        try:
            made = zygote.create_zygote(limits, [], log)
        finally:
            os.close(log)
        await asyncio.wait_for(made.started(), 60)
        assert made.is_alive
        zygote.stop()
        assert not made.is_alive
