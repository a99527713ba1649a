"""Meters: counts of requests in progress in a memory-mapped file, which survives the router.

A killed process loses nothing that it has written to a shared mapping, and a count costs one store. Each request has a slot of SLOT_BYTES: eight
words (state, tokens, end), the site's name, the request's record as JSON, and eight more words at the end. The file's blocks are allocated at the
start, so a disk that fills up later does no harm. A slot is free again once its record is in the store. After a power failure the last seconds may be
lost.
"""

import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec

from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import MeteredRequest, Outcome, UsageRecord

FILE_NAME = "meters"
SLOT_BYTES = 1024
MAGIC = b"PILOTLIGHT METER 2".ljust(SLOT_BYTES, b"\0")  # first slot of a file
FREE, OPEN = 0, 1
# The state of an ended slot is OPEN + 1 + the position of its outcome here.
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
SITE_AT, SITE_BYTES = 64, 64
REQUEST_AT = SITE_AT + SITE_BYTES
WORD = 8
MORE_AT = SLOT_BYTES - 8 * WORD
_STATE, _PROMPT, _CACHED, _OUTPUT, _REASONING, _ENDED_US, _LENGTH = range(7)
_DRAFTED, _ACCEPTED, _DEVICE_US, _BYTES_OUT, _CPU_US = range(MORE_AT // WORD, MORE_AT // WORD + 5)


class MetersError(Exception):
    """The file cannot be used; the message has the reason."""


class MeterFile:
    """The file with all slots. One process uses it at a time."""

    def __init__(self, path: Path, num_slots: int) -> None:
        """Open the file, or create it. Raises MetersError, OSError."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise MetersError(
                    f"{path} belongs to another running router: give each router its own directory"
                ) from None
            before = os.fstat(self._fd).st_size
            if before and os.pread(self._fd, SLOT_BYTES, 0) not in (MAGIC, bytes(SLOT_BYTES)):
                raise MetersError(f"{path} is not a file of meters: move it away")
            self.num_slots = max(num_slots, before // SLOT_BYTES - 1)
            os.posix_fallocate(self._fd, 0, (self.num_slots + 1) * SLOT_BYTES)
            self._map = mmap.mmap(self._fd, (self.num_slots + 1) * SLOT_BYTES)
        except BaseException:
            os.close(self._fd)
            raise
        self._words = memoryview(self._map).cast("Q")
        self._map[:SLOT_BYTES] = MAGIC
        self._free = [number for number in range(self.num_slots, 0, -1) if self._words[_base(number)] == FREE]

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def begin(self, request: MeteredRequest) -> "MeterSlot | None":
        """Return a meter for a request; None if all slots are in use."""
        if not self._free:
            return None
        encoded = _encode(request)
        number = self._free.pop()
        start, base = number * SLOT_BYTES, _base(number)
        words = self._words
        for word in (*range(_PROMPT, _LENGTH), *range(_DRAFTED, _CPU_US + 1)):
            words[base + word] = 0
        self._map[start + SITE_AT : start + REQUEST_AT] = bytes(SITE_BYTES)
        self._map[start + REQUEST_AT : start + REQUEST_AT + len(encoded)] = encoded
        words[base + _LENGTH] = len(encoded)
        words[base + _STATE] = OPEN  # last, because a slot is valid only when it is complete
        return MeterSlot(self, number, request)

    def set(self, number: int, use: ResourceUse) -> None:
        words, at = self._words, _base(number)
        words[at + 1], words[at + 2], words[at + 3], words[at + 4] = use[:4]
        words[at + _DRAFTED], words[at + _ACCEPTED], words[at + _DEVICE_US] = use[4:]

    def set_bytes_out(self, number: int, bytes_out: int) -> None:
        self._words[_base(number) + _BYTES_OUT] = bytes_out

    def set_cpu(self, number: int, cpu_us: int) -> None:
        self._words[_base(number) + _CPU_US] = cpu_us

    def set_site(self, number: int, site: str) -> None:
        start = number * SLOT_BYTES + SITE_AT
        self._map[start : start + SITE_BYTES] = site.encode()[:SITE_BYTES].ljust(SITE_BYTES, b"\0")

    def end(self, number: int, outcome: Outcome, ended_s: float) -> None:
        base = _base(number)
        self._words[base + _ENDED_US] = max(0, int(ended_s * 1e6))
        self._words[base + _STATE] = OPEN + 1 + OUTCOMES.index(outcome)

    def free(self, number: int) -> None:
        """Free a slot for another request, because its record is in the store or not needed."""
        self._words[_base(number)] = FREE
        self._free.append(number)

    def left_behind(self) -> Iterator[tuple[int, UsageRecord]]:
        """Yield the slots of a router that was killed, with their records: unwritten ones and open requests."""
        for number in range(1, self.num_slots + 1):
            base, start = _base(number), number * SLOT_BYTES
            state = self._words[base]
            if state == FREE:
                continue
            length = self._words[base + _LENGTH]
            request = _decode(self._map[start + REQUEST_AT : start + REQUEST_AT + min(length, _MOST)])
            if request is None:  # the record is incomplete: power was lost before anything was sent for the request
                self.free(number)
                continue
            more = self._words[base + _DRAFTED : base + _CPU_US + 1].tolist()
            use = ResourceUse(*self._words[base + _PROMPT : base + _ENDED_US], *more[:3])
            site = self._map[start + SITE_AT : start + REQUEST_AT].rstrip(b"\0").decode(errors="replace")
            has_ended = OPEN < state <= OPEN + len(OUTCOMES)
            outcome = OUTCOMES[state - OPEN - 1] if has_ended else "recovered"
            ended_s = self._words[base + _ENDED_US] / 1e6 if has_ended else request.started_s
            yield number, UsageRecord(request, site, ended_s, outcome, use, more[3], cpu_us=more[4])

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self._fd)


def is_in_use(path: Path) -> bool:
    """Tell whether a running process uses the file."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # there is no such file, or `MeterFile` will report the reason
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class MeterSlot:
    """The slot of one request, and its counts."""

    __slots__ = ("_file", "bytes_out", "cpu_us", "number", "request", "site", "use")

    def __init__(self, file: MeterFile, number: int, request: MeteredRequest) -> None:
        self.number = number
        self.request = request
        self.site = ""
        self.use = ResourceUse()
        self.bytes_out = 0  # bytes of the answer's body
        self.cpu_us = 0  # CPU time of a function's processes
        self._file = file

    def count(self, use: ResourceUse) -> None:
        """Set the totals, before the tokens are sent to the client."""
        self.use = use
        self._file.set(self.number, use)

    def sends(self, num_bytes: int) -> None:
        self.bytes_out += num_bytes
        self._file.set_bytes_out(self.number, self.bytes_out)

    def computes(self, cpu_us: int) -> None:
        self.cpu_us += cpu_us
        self._file.set_cpu(self.number, self.cpu_us)

    def answered_by(self, site: str) -> None:
        if site != self.site:
            self.site = site
            self._file.set_site(self.number, site)


def _base(number: int) -> int:
    return number * SLOT_BYTES // WORD


_MOST = MORE_AT - REQUEST_AT
_LONGER_IN_JSON = re.compile(r'[^ -~]|["\\]')
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(MeteredRequest)


def _encode(request: MeteredRequest) -> bytes:
    encoded = _encoder.encode(request)
    if len(encoded) > _MOST:  # happens only for names of models and adapters that no site serves
        model, adapter = _beginning(request.model, 200), _beginning(request.adapter, 100)
        short = msgspec.structs.replace(request, model=model, adapter=adapter, request_id=request.request_id[:128])
        encoded = _encoder.encode(short)
    assert len(encoded) <= _MOST, "it would be written into the next slot"
    return encoded


def _beginning(text: str, most: int) -> str:
    """Return up to `most` characters, each of which takes one byte in JSON."""
    return _LONGER_IN_JSON.sub("?", text[:most])


def _decode(data: bytes) -> MeteredRequest | None:
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:
        return None
