"""A bootstrap program: a model's forward pass as calls of the C library, with their data's places.

It takes up to `rows` tokens at once, of any sequences: a prompt's tokens, too, are queries with a context each, since keys and values of all of them
are written before any is read. Its file also contains those weights that no file of the checkpoint has in the needed form. Knows the byte format;
does not know torch, or what computes.

magic (8) | length (8) and digest (32) of the msgpack | msgpack | zeros up to a page | weights, each from a cache line on | their CRC-32 (4)
"""

import os
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

from pilotlight.engine.api.protocol import ModelInfo

_MAGIC = b"PLBOOT02"  # includes the version of the format, and of what a host expects in it
_DIGEST_BYTES = 32
_HEAD_BYTES = len(_MAGIC) + 8 + _DIGEST_BYTES
_MOST_TEXT_BYTES = 64 << 20
_PAGE, _LINE = 4096, 64
_SUM_BYTES = 4
_READ_BYTES = 4 << 20


class ProgramError(Exception):
    """A file that is not a usable program; the message gives the reason."""


class Address(NamedTuple):
    """A place in memory to which an argument of a call points."""

    memory: str  # "weight", "input", "work" or "kv"
    which: int  # of that kind
    offset: int  # in bytes


class FileRange(NamedTuple):
    file: str  # of the checkpoint's directory
    start: int
    num_bytes: int


class ProgramWeight(NamedTuple):
    """A tensor that the program reads."""

    num_bytes: int
    parts: tuple[FileRange, ...]  # in sequence; none if it is in the program's own file
    start: int = 0  # its offset there, from the start of the weights


class Inputs(NamedTuple):
    """Offsets of the step's inputs, in one piece of memory.

    It starts with token ids, positions, slots and context lengths, int64 [4, rows].
    """

    tables: int  # offset of block tables, int64 [rows, blocks]
    picked: int  # hidden states whose logits are needed, [rows, hidden]
    num_bytes: int


class Step(NamedTuple):
    """A call, with an Address for each pointer argument."""

    function: str
    arguments: tuple[int | float | bool | Address | None, ...]


class BootstrapProgram(NamedTuple):
    fingerprint: str  # of the checkpoint
    library: str  # whose functions are called
    host: tuple[int | None, ...]  # settings on which `info` depends: kv_bytes, block_size and kv_tokens
    info: ModelInfo
    rows: int
    max_blocks: int  # of one sequence
    block_bytes: int  # of the KV cache, all layers
    hidden_bytes: int  # of one token's hidden state
    weights: tuple[ProgramWeight, ...]
    work: tuple[int, ...]  # sizes of the memory for results
    inputs: Inputs
    forward: tuple[Step, ...]
    hidden: Address  # [rows, hidden]
    logits: tuple[Step, ...]  # of the picked rows
    logits_at: Address  # fp32 [rows, vocab]

    @property
    def own_bytes(self) -> int:
        return max((weight.start + weight.num_bytes for weight in self.weights if not weight.parts), default=0)


def place(sizes: list[int]) -> list[int]:
    """Return the offsets of tensors of these sizes among a file's weights."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _LINE) * _LINE
    return starts


def encode(program: BootstrapProgram) -> bytes:
    """Return the bytes of the file before the weights."""
    import msgspec  # a host has it; a machine on which an engine only runs in-process may not

    text = msgspec.msgpack.encode(program)
    head = _MAGIC + len(text).to_bytes(8, "little") + blake2b(text, digest_size=_DIGEST_BYTES).digest() + text
    return head.ljust(_whole_pages(len(head)), b"\0")


def encode_sum(checksum: int) -> bytes:
    """Return the end of the file after the weights: the CRC-32 of their bytes and of padding."""
    return checksum.to_bytes(_SUM_BYTES, "little")


def read(fd: int) -> tuple[BootstrapProgram, int]:
    """Return the program, and the offset of its weights.

    Raises ProgramError for anything but a whole file of this version, and OSError.
    """
    import msgspec

    size = os.fstat(fd).st_size
    head = os.pread(fd, _HEAD_BYTES, 0)
    if head[: len(_MAGIC)] != _MAGIC:
        raise ProgramError(f"it begins with {head[: len(_MAGIC)]!r} and not with {_MAGIC!r}")
    length = int.from_bytes(head[len(_MAGIC) : len(_MAGIC) + 8], "little")
    if length > min(size, _MOST_TEXT_BYTES):
        raise ProgramError(f"it is truncated: {size} bytes cannot contain its program")
    text = os.pread(fd, length, _HEAD_BYTES)
    if blake2b(text, digest_size=_DIGEST_BYTES).digest() != head[-_DIGEST_BYTES:]:
        raise ProgramError("it is damaged: its digest does not match")
    try:
        program = msgspec.msgpack.decode(text, type=BootstrapProgram)
    except msgspec.DecodeError as error:
        raise ProgramError(f"it is not a program of this release: {error}") from None
    start = _whole_pages(_HEAD_BYTES + length)
    end = start + program.own_bytes
    if size != end + _SUM_BYTES:
        raise ProgramError(f"it is truncated: {size} of {end + _SUM_BYTES} bytes")
    checksum = 0
    for at in range(start, end, _READ_BYTES):
        checksum = crc32(os.pread(fd, min(_READ_BYTES, end - at), at), checksum)
    if os.pread(fd, _SUM_BYTES, end) != encode_sum(checksum):
        raise ProgramError("it is damaged: the checksum of its weights does not match")
    return program, start


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
