"""Fault rows: members with wrong information, such as another secret, another time or an edited file."""

import signal
import time
from pathlib import Path

from load_tests.faults.members import ROUTER, Differently
from load_tests.faults.rows import Row, Strike
from pilotlight.wire.hop.headers import HOP_SECRET_ENV

SKEWED = Path(__file__).parent / "skewed"  # its sitecustomize.py moves the wall clock
WRONG = {HOP_SECRET_ENV: "another secret than all the others have"}


def rows() -> list[Row]:
    return [
        Row("a wrong secret at one site", _says("ams1"), {"ams1": Differently(WRONG)}, expected=("iad1", "sin1")),
        Row("the router's clock an hour behind", _says(*()), {ROUTER: Differently(skewed(-3600))}),
        Row("a site's clock 180 s ahead", _says("ams1"), {"ams1": Differently(skewed(180))}),
        Row("the only site's clock 180 s ahead", _says("ams1"), {"ams1": Differently(skewed(180))}, names=("ams1",)),
        Row("SIGHUP to every member", hangup),
    ]  # fmt: skip


def skewed(seconds: float) -> dict[str, str]:
    """Return the environment of a process whose wall clock is `seconds` ahead."""
    return {"PYTHONPATH": str(SKEWED), "PILOTLIGHT_FAULTS_CLOCK_S": str(seconds)}


def _says(*sites: str):  # type: ignore[no-untyped-def]
    """Return a check that the router's log names the fault. It also notes what the sites' logs say."""

    def look(it: Strike) -> None:
        time.sleep(2)
        words = ("secret", "signature", "clock")
        lines = [line for line in it.network.log(ROUTER).splitlines() if any(word in line.lower() for word in words)]
        it.notes["router_log"] = lines[:3]
        for site in sites:
            said = [line for line in it.network.log(site).splitlines() if any(word in line.lower() for word in words)]
            it.notes[f"{site}_log"] = said[:3]
        if not lines:
            raise RuntimeError("the router's log does not name the fault")

    return look


def hangup(it: Strike) -> None:
    processes = {name: member.process for name, member in it.network.members.items()}
    for process in processes.values():
        process.send_signal(signal.SIGHUP)
    time.sleep(3)
    ended = [name for name, process in processes.items() if process.poll() == -signal.SIGHUP]
    if ended:
        raise RuntimeError(f"SIGHUP ended {', '.join(ended)}")
