"""A file of the sequences that an engine host is computing, which outlives it.

It shows which sequences a host died under. Part of the client half: a site reads what its host has written. Knows names of sequences; does not know
how a host dies.
"""

import json
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_LENGTH = struct.Struct("<Q")
_SIZE = 1 << 20  # bytes; 2,048 sequences with names of 36 characters take 80 kB


class HeldSequences(NamedTuple):
    """Names of the sequences for which a host is working."""

    computed: Sequence[str] = ()  # by running steps
    prepared: Sequence[str] = ()  # by threads: images, adapters, grammars, blocks


NOTHING_HELD = HeldSequences()


class StepJournal:
    """The writing side, through memory shared with the file: it survives any end of the process."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(_SIZE)
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._held: dict[str, HeldSequences] = {}  # by model

    def note(self, model: str, held: HeldSequences) -> None:
        """Write the sequences of a model's steps, before a start and after an end."""
        if self._held.get(model, NOTHING_HELD) == held:
            return
        self._held[model] = held
        computed, prepared = ([name for each in self._held.values() for name in each[i]] for i in range(2))
        data = json.dumps([computed, prepared]).encode()
        self._memory[: _LENGTH.size] = _LENGTH.pack(0)  # a crash in the middle leaves an empty journal, not half of one
        if len(data) <= _SIZE - _LENGTH.size:
            self._memory[_LENGTH.size : _LENGTH.size + len(data)] = data
            self._memory[: _LENGTH.size] = _LENGTH.pack(len(data))


def read_journal(path: Path) -> HeldSequences:
    """Return the sequences that the host wrote last; none if the file is missing or was being written."""
    try:
        data = path.read_bytes()
    except OSError:
        return NOTHING_HELD
    (length,) = _LENGTH.unpack_from(data) if len(data) >= _LENGTH.size else (0,)
    if not 0 < length <= len(data) - _LENGTH.size:
        return NOTHING_HELD
    computed, prepared = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    return HeldSequences(tuple(computed), tuple(prepared))
