"""The warm-up of a zygote: it succeeds and leaves no state."""

import sys

import pytest

from pilotlight.functions.sandbox.zygotes import prefork
from workers import entrypoint, env, host


def test_nothing_stays_of_a_warm_up() -> None:
    before = set(sys.modules), sys.path[:], entrypoint.on_background, dict(vars(env))
    prefork.warm_up()
    assert prefork.FUNCTION.stem not in sys.modules
    assert (set(sys.modules), sys.path, entrypoint.on_background, dict(vars(env))) == before
    with pytest.raises(RuntimeError, match="inside a handler"):
        host.channel()
