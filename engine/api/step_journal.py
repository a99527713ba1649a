"""A journal of the sequences that an engine host is computing, in a file that outlives the host.

It shows which sequences a host was computing when it died: the host writes the file, and the site reads it. This module is independent of why a host
dies.
"""

import json
import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pilotlight.support.file_calls import allocate_pages

_LENGTH = struct.Struct("<Q")
_SIZE = 1 << 20  # bytes; 2,048 sequences with names of 36 characters take 80 kB


class HeldSequences(NamedTuple):
    """Names of the sequences for which a host is working."""

    computed: Sequence[str] = ()  # sequences in running steps
    prepared: Sequence[str] = ()  # sequences for which threads prepare images, adapters, grammars or blocks


NOTHING_HELD = HeldSequences()


class StepJournal:
    """The host's side of the journal, which writes to a shared map, so that the file survives a kill."""

    def __init__(self, path: Path) -> None:
        """Create the file. Raises OSError if the file system is full."""
        with path.open("w+b") as file:
            file.truncate(_SIZE)
            allocate_pages(file.fileno(), 0, _SIZE)
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._held: dict[str, HeldSequences] = {}  # sequences by the model's name

    def note(self, model: str, held: HeldSequences) -> None:
        """Write a model's sequences; call this before a step starts and after it ends."""
        if self._held.get(model, NOTHING_HELD) == held:
            return
        self._held[model] = held
        computed, prepared = ([name for each in self._held.values() for name in each[i]] for i in range(2))
        data = json.dumps([computed, prepared]).encode()
        self._memory[: _LENGTH.size] = _LENGTH.pack(0)  # a crash while writing then leaves an empty journal
        if len(data) <= _SIZE - _LENGTH.size:
            self._memory[_LENGTH.size : _LENGTH.size + len(data)] = data
            self._memory[: _LENGTH.size] = _LENGTH.pack(len(data))


def read_journal(path: Path) -> HeldSequences:
    """Return the sequences that the host wrote last; none if the file is missing or incomplete."""
    try:
        data = path.read_bytes()
    except OSError:
        return NOTHING_HELD
    (length,) = _LENGTH.unpack_from(data) if len(data) >= _LENGTH.size else (0,)
    if not 0 < length <= len(data) - _LENGTH.size:
        return NOTHING_HELD
    computed, prepared = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    return HeldSequences(tuple(computed), tuple(prepared))
