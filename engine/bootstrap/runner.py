"""Runs a bootstrap program as an engine's runner: chunks in, tokens out, with neither torch nor tensors.

Tokens go through the program in order, as many at a time as it takes: each finds the keys and values of those before it in the cache. Knows
addresses and what lies there; refuses to know what waits for the tokens.
"""

import ctypes
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

from engine.bootstrap.memory import ProgramMemory
from engine.bootstrap.program import Address, BootstrapProgram, Step
from engine.bootstrap.sampler import BootstrapSampler
from engine.plan import Chunk
from engine.results import ChunkResult, RunResult, SampledToken
from kernels.cpu import functions

# Arguments that follow the batch. The last of each is the number of threads.
_ROWS_AT = {
    "linear": 4,
    "rows_of": 3,
    "rms_norm": 5,
    "rotate_and_cache": 7,
    "gated_activation": 2,
    "decode_attention": 7,
}
_BLOCKS_AT = {"decode_attention": 9}  # of each block table
_LONG = ctypes.sizeof(ctypes.c_int64)


def operation_of(function: str) -> str:
    """Return a function's name without its type."""
    return function.rpartition("_")[0]


def follows_batch(step: Step, rows: int, max_blocks: int) -> bool:
    """Whether it is known how to make this step of fewer rows and blocks."""
    at = _ROWS_AT.get(operation_of(step.function))
    blocks_at = _BLOCKS_AT.get(operation_of(step.function))
    return (
        at is not None and step.arguments[at] == rows and (blocks_at is None or step.arguments[blocks_at] == max_blocks)
    )


class _Row(NamedTuple):
    """One token to be computed."""

    token_id: int
    position: int
    table: "array[int]"
    samples: Chunk | None  # its logits choose the next token of this chunk's sequence


class BootstrapRunner:
    overlaps = False

    def __init__(
        self, program: BootstrapProgram, memory: ProgramMemory, library: functions.Opened, threads: int
    ) -> None:
        """Raises AttributeError or KeyError for a function that the library does not have."""
        self._program = program
        self._memory = memory
        self._block_size = program.info.block_size
        self._threads = threads
        self._forward = [self._bound(library, step) for step in program.forward]
        self._logits = [self._bound(library, step) for step in program.logits]
        self._sampler = BootstrapSampler(library, program.info.vocab_size, threads)
        self._longs = memoryview(memory.inputs.memory).cast("B")

    def launch(self, chunks: SequenceOf[Chunk]) -> "Computed":
        """Compute the step at once: collecting it waits for nothing."""
        began = time.perf_counter()
        rows = [row for chunk in chunks for row in _rows_of(chunk)]
        tokens: dict[str, SampledToken] = {}
        for start in range(0, len(rows), self._program.rows):
            self._run(rows[start : start + self._program.rows], tokens)
        results = [ChunkResult(tokens.get(chunk.sequence.sequence_id)) for chunk in chunks]
        return Computed(RunResult(results, time.perf_counter() - began))

    def scrub(self, blocks: SequenceOf[int]) -> None:
        for block in blocks:
            address = self._memory.kv.address + block * self._program.block_bytes
            ctypes.memset(address, 0, self._program.block_bytes)

    def reset(self) -> None:
        ctypes.memset(self._memory.kv.address, 0, self._memory.kv.num_bytes)

    def _run(self, rows: SequenceOf[_Row], tokens: dict[str, SampledToken]) -> None:
        num_blocks = max(row.position for row in rows) // self._block_size + 1
        self._put(rows, num_blocks)
        self._call(self._forward, len(rows), num_blocks)
        sampling = [i for i, row in enumerate(rows) if row.samples is not None]
        if not sampling:
            return
        program, memory = self._program, self._memory
        hidden, picked = memory[program.hidden], memory.inputs.address + program.inputs.picked
        for place, i in enumerate(sampling):
            ctypes.memmove(
                picked + place * program.hidden_bytes, hidden + i * program.hidden_bytes, program.hidden_bytes
            )
        self._call(self._logits, len(sampling), num_blocks)
        logits = memory[program.logits_at]
        for place, i in enumerate(sampling):
            chunk = rows[i].samples
            assert chunk is not None
            sequence = chunk.sequence
            row = logits + place * program.info.vocab_size * ctypes.sizeof(ctypes.c_float)
            tokens[sequence.sequence_id] = self._sampler.choose(row, sequence.sampling, len(sequence.token_ids))

    def _put(self, rows: SequenceOf[_Row], num_blocks: int) -> None:
        """Write the step's inputs: numbers as far apart as if all rows were there, block tables one behind the other."""
        size, most = self._block_size, self._program.rows
        numbers = (
            [row.token_id for row in rows],
            [row.position for row in rows],
            [row.table[row.position // size] * size + row.position % size for row in rows],
            [row.position + 1 for row in rows],
        )
        for i, column in enumerate(numbers):
            self._write(i * most * _LONG, array("q", column))
        tables = array("q")
        for row in rows:
            tables.extend(row.table[:num_blocks])
            tables.extend(row.table[:1] * (num_blocks - len(row.table)))
        self._write(self._program.inputs.tables, tables)

    def _write(self, at: int, numbers: "array[int]") -> None:
        content = memoryview(numbers).cast("B")
        self._longs[at : at + len(content)] = content

    def _bound(self, library: functions.Opened, step: Step) -> "_BoundCall":
        name = operation_of(step.function)
        arguments = [
            self._memory[argument] if isinstance(argument, Address) else argument for argument in step.arguments
        ]
        arguments[-1] = self._threads
        return _BoundCall(functions.find(library, step.function), arguments, _ROWS_AT[name], _BLOCKS_AT.get(name))

    def _call(self, calls: "SequenceOf[_BoundCall]", rows: int, num_blocks: int) -> None:
        for function, arguments, rows_at, blocks_at in calls:
            arguments[rows_at] = rows
            if blocks_at is not None:
                arguments[blocks_at] = num_blocks
            function(*arguments)


class _BoundCall(NamedTuple):
    function: Callable[..., Any]
    arguments: list[Any]
    rows_at: int
    blocks_at: int | None


class Computed(NamedTuple):
    """A step that has ended."""

    result: RunResult

    def collect(self) -> RunResult:
        return self.result


def _rows_of(chunk: Chunk) -> list[_Row]:
    sequence = chunk.sequence
    return [
        _Row(
            sequence.token_ids[position],
            position,
            sequence.block_table,
            chunk if chunk.samples and position == chunk.end - 1 else None,
        )
        for position in range(chunk.start, chunk.end)
    ]
