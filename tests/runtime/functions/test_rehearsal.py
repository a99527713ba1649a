"""The rehearsal of an isolate's life: it goes through, and nothing of it stays."""

import gc
import sys

from runtime.functions import rehearsal
from workers import entrypoint, env, host


def test_nothing_stays_of_a_rehearsal() -> None:
    before = set(sys.modules), sys.path[:], entrypoint.on_background, dict(vars(env))
    try:
        rehearsal.rehearse()
    finally:
        gc.unfreeze()
    assert rehearsal.FUNCTION.stem not in sys.modules
    assert (set(sys.modules), sys.path, entrypoint.on_background, dict(vars(env))) == before
    assert host._channel is None
