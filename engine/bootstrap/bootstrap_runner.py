"""The runner of a bootstrap program: a step's input in, tokens out, without torch or tensors.

Tokens go through the program in order, as many at a time as it takes: each finds the keys and values of earlier ones in the cache. Knows addresses
and their contents; does not know what the tokens are for.
"""

import ctypes
import time
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

from pilotlight.engine.bootstrap.bootstrap_memory import ProgramMemory
from pilotlight.engine.bootstrap.program import Address, BootstrapProgram, Step
from pilotlight.engine.bootstrap.sampler import BootstrapSampler
from pilotlight.engine.core.results import RunResult
from pilotlight.engine.core.step import ChoiceRow, StepInput
from pilotlight.kernels.cpu import functions

# Positions of the arguments that depend on the batch. The last of each is the number of threads.
_ROWS_AT = {
    "linear": 4,
    "rows_of": 3,
    "rms_norm": 5,
    "rotate_and_cache": 7,
    "gated_activation": 2,
    "decode_attention": 7,
}
_BLOCKS_AT = {"decode_attention": 9}  # per block table
_LONG = ctypes.sizeof(ctypes.c_int64)


def operation_of(function: str) -> str:
    """Return a function's name without its dtype."""
    return function.rpartition("_")[0]


def follows_batch(step: Step, rows: int, max_blocks: int) -> bool:
    """True if this step can be adapted to fewer rows and blocks."""
    at = _ROWS_AT.get(operation_of(step.function))
    blocks_at = _BLOCKS_AT.get(operation_of(step.function))
    return (
        at is not None and step.arguments[at] == rows and (blocks_at is None or step.arguments[blocks_at] == max_blocks)
    )


class _Row(NamedTuple):
    """One token to compute."""

    token_id: int
    position: int
    slot: int
    table: "array[int]"


class ComputedHidden(NamedTuple):
    """A step's finished forward pass."""

    hidden: "ctypes.Array[ctypes.c_char]"  # of the tokens whose logits are needed
    computed_s: float


class BootstrapRunner:
    depth = 1
    num_graphs = graph_failures = 0

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

    def forward(self, step: StepInput) -> ComputedHidden:
        began = time.perf_counter()
        (group,), size, most = step.groups, self._program.hidden_bytes, self._program.rows
        tables = [table for table, length in zip(group.tables, step.lengths, strict=True) for _ in range(length)]
        rows = list(map(_Row, step.token_ids, step.positions, group.slots, tables))
        wanted = range(len(rows)) if step.logit_rows is None else step.logit_rows
        picked, hidden = ctypes.create_string_buffer(len(wanted) * size), self._memory[self._program.hidden]
        for start in range(0, len(rows), most):
            self._compute(rows[start : start + most])
            for place, row in enumerate(wanted):
                if start <= row < start + most:
                    ctypes.memmove(ctypes.byref(picked, place * size), hidden + (row - start) * size, size)
        return ComputedHidden(picked, time.perf_counter() - began)

    def choose(self, forwarded: ComputedHidden, rows: SequenceOf[ChoiceRow]) -> "Computed":
        """Choose tokens at once; `collect` then returns without waiting."""
        began = time.perf_counter()
        program, size, most = self._program, self._program.hidden_bytes, self._program.rows
        picked, logits = self._memory.inputs.address + program.inputs.picked, self._memory[program.logits_at]
        tokens = []
        for start in range(0, len(rows), most):
            some = rows[start : start + most]
            for place, row in enumerate(some):
                ctypes.memmove(picked + place * size, ctypes.byref(forwarded.hidden, row.row * size), size)
            self._call(self._logits, len(some), 0)
            for place, row in enumerate(some):
                address = logits + place * program.info.vocab_size * ctypes.sizeof(ctypes.c_float)
                tokens.append(self._sampler.choose(address, row.sampling, row.position))
        return Computed(RunResult(tokens, {}, {}, forwarded.computed_s + time.perf_counter() - began))

    def scrub(self, blocks: SequenceOf[int]) -> None:
        for block in blocks:
            address = self._memory.kv.address + block * self._program.block_bytes
            ctypes.memset(address, 0, self._program.block_bytes)

    def reset(self) -> None:
        ctypes.memset(self._memory.kv.address, 0, self._memory.kv.num_bytes)

    def _compute(self, rows: SequenceOf[_Row]) -> None:
        """Compute the hidden states of as many tokens as the program takes."""
        num_blocks = max(row.position for row in rows) // self._block_size + 1
        self._put(rows, num_blocks)
        self._call(self._forward, len(rows), num_blocks)

    def _put(self, rows: SequenceOf[_Row], num_blocks: int) -> None:
        """Write the step's inputs: numbers in columns of the full number of rows, then block tables."""
        most = self._program.rows
        numbers = (
            [row.token_id for row in rows],
            [row.position for row in rows],
            [row.slot for row in rows],
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
    """A finished step."""

    result: RunResult

    def collect(self) -> RunResult:
        return self.result
