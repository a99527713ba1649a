"""Random bytes from the system, drawn many at a time: asking the kernel for each name of a request and of its answer costs more than making them.

Nothing is handed out twice, nor by two processes. Knows nothing of what the bytes are for.
"""

import os

DRAWN_AT_ONCE = 4096


class _Drawn:
    __slots__ = ("at", "chance")

    def __init__(self) -> None:
        self.chance = b""
        self.at = 0

    def forget(self) -> None:
        self.chance, self.at = b"", 0


_drawn = _Drawn()
os.register_at_fork(after_in_child=_drawn.forget)  # else parent and child would go on with the same


def random_bytes(count: int) -> bytes:
    """As good as `os.urandom`'s."""
    at = _drawn.at
    taken = _drawn.chance[at : at + count]
    if len(taken) < count:
        _drawn.chance, at = os.urandom(DRAWN_AT_ONCE + count), 0
        taken = _drawn.chance[:count]
    _drawn.at = at + count
    return taken
