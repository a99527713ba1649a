"""Faults: the errors that a function's author gets, and descriptions of how a process ended."""

import os
import signal

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.sandbox.zygotes.control_messages import Died
from pilotlight.support.logs import printable


class Fault(Failure):
    """A failure caused by the function itself, not by other functions or the site."""


def manner_of(report: Died | None) -> str:
    if report is None:
        return "ended for an unknown reason"
    if os.WIFSIGNALED(report.status):
        number = os.WTERMSIG(report.status)
        return f"was killed by signal {number} ({signal.strsignal(number)})"
    return f"ended its process with exit status {os.waitstatus_to_exitcode(report.status)}"


def fault_of(failure: Failure) -> Fault:
    """Convert a failure that an isolate reported to a fault that is safe for logs and terminals."""
    message, name, detail = printable(failure.message), printable(failure.name), printable(failure.detail, keep="\n\t")
    return Fault(message, code=failure.code, status=500, name=name, detail=detail, value=failure.value)


def authors_frames(text: str) -> str:
    """Return a stack dump with, for each thread, only the frames of the author's code."""
    kept: list[str] = []
    is_skipping = False
    for line in text.splitlines():
        if not line.startswith("  "):
            is_skipping = False
        elif "/labelled_output.py" in line:
            continue  # a frame of this project above the author's `print`
        elif "/asyncio/" in line or "/pilotlight/functions/" in line:
            is_skipping = True
        if not is_skipping and line.strip():
            kept.append(line)
    return "\n".join(kept)
