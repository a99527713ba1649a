"""An event as nearly all of a stream come: one read, one chunk, one event, a mark for its tokens, and more to follow.

Such a one is known by its bytes alone, at a tenth of what it costs to have it parsed, decoded and taken apart. Whatever else comes is read in the
ordinary way (link.py, wire/sse.py, wire/continuation.py), which gives the same: this is a shorter way and no other grammar.
"""

import re
from typing import NamedTuple

MAX_TOKEN_ID = 2**31

_NUMBER = rb"(?:0|[1-9][0-9]{0,9})"  # as JSON has it
_PLAIN = re.compile(
    rb"([0-9A-Fa-f]{1,6})\r\n"
    rb":pl \[(%(n)s),\[(%(n)s(?:,%(n)s)*)\],null,(%(n)s)\]\n"
    rb"((?:(?!data)[^\r\n]+\n)*data: (?!\[DONE\])[^\r\n]+\n\n)\r\n" % {b"n": _NUMBER}
)


class PlainEvent(NamedTuple):
    choice: int
    token_ids: tuple[int, ...]
    cached_tokens: int
    told: bytes  # what the client gets of it

    @classmethod
    def of(cls, read: bytes) -> "PlainEvent | None":
        """None: it is something else."""
        found = _PLAIN.fullmatch(read)
        if found is None:
            return None
        size, choice, ids, cached, told = found.groups()
        if int(size, 16) != len(read) - len(size) - 4:
            return None
        token_ids = (int(ids),) if b"," not in ids else tuple(map(int, ids.split(b",")))
        return cls(int(choice), token_ids, int(cached), told) if max(token_ids) < MAX_TOKEN_ID else None
