"""Observed and refused calls of the operating system, through the audit events of the interpreter (PEP 578).

A test sees a rename, an opened file or a lock whichever function of the product makes the call, and replaces none.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Observer = Callable[[str, tuple[object, ...]], None]
_observers: list[Observer] = []


@contextmanager
def observed_calls(observer: Observer) -> Iterator[None]:
    """Call `observer` with each event and its arguments, in the calling thread, before the operating system does the work.

    If it raises an exception, the call fails with it.
    """
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def _notify(event: str, arguments: tuple[object, ...]) -> None:
    for observer in tuple(_observers):
        observer(event, arguments)


sys.addaudithook(_notify)  # the interpreter cannot remove a hook, so that one serves all tests
