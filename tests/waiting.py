"""Waiting for effects of another thread or process; only a failing test reaches the limit."""

import time
from collections.abc import Callable


def until(condition: Callable[..., object], what: str = "what was waited for", within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"did not happen within {within_s:g} s: {what}"
        time.sleep(0.005)
