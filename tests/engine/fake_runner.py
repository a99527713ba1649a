"""A runner without a model: the next token is a function of the earlier tokens, and the cache is checked rather than filled."""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from pilotlight.engine.api.protocol import ModelInfo, TokenLogprobs
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import PENDING
from pilotlight.engine.core.step import ChoiceRow, RunResult, SampledToken, StepInput
from pilotlight.engine.images.image_residency import ImageEncoder
from pilotlight.engine.kv.lending.slab_allocator import SlabAllocator
from pilotlight.engine.kv.pool.groups import Windows
from pilotlight.engine.kv.tier_protocol import Tiers
from pilotlight.engine.scheduling.plan import SchedulerLimits, Speculation

VOCAB = 1000


def next_token(token_ids: SequenceOf[int]) -> int:
    return (sum(token_ids[-3:]) * 31 + len(token_ids)) % VOCAB


def expected_tokens(prompt: list[int], n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def next_penalised_token(prompt: SequenceOf[int], outputs: SequenceOf[int]) -> int:
    return (next_token([*prompt, *outputs]) + sum(outputs)) % VOCAB


def prompt_logprob(before: SequenceOf[int]) -> TokenLogprobs:
    return TokenLogprobs(-float(next_token(before)))


def prompt_logprobs_of(token_ids: SequenceOf[int]) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of all tokens except the first."""
    return tuple(prompt_logprob(token_ids[:i]) for i in range(1, len(token_ids)))


@dataclass
class FakeArena:
    """An arena that stores for each byte its writer, (model, block), or None if the byte is zero."""

    num_slabs: int
    slab_bytes: int
    copies: int = 1  # number of ranks; the bytes of each follow those of the previous rank
    writers: list[tuple[str, int] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.writers = [None] * (self.copies * self.num_slabs * self.slab_bytes)
        self.slabs = SlabAllocator(self.num_slabs, self.slab_bytes, self.clear)

    def clear(self, slab: int) -> None:
        for copy in range(self.copies):
            start = (copy * self.num_slabs + slab) * self.slab_bytes
            self.writers[start : start + self.slab_bytes] = [None] * self.slab_bytes


class FakeMemory:
    """One model's view of the arena, from the byte `start` on."""

    def __init__(self, arena: FakeArena, model: str, block_bytes: int, start: int = 0) -> None:
        self.arena, self.model, self.block_bytes, self.start = arena, model, block_bytes, start

    def write(self, block: int) -> None:
        self.arena.writers[self._span(block)] = [(self.model, block)] * self.block_bytes

    def check(self, block: int) -> None:
        assert set(self.arena.writers[self._span(block)]) == {(self.model, block)}, "another model wrote into the block"

    def _span(self, block: int) -> slice:
        there, copy = divmod(block, self.arena.copies)
        start = copy * self.arena.num_slabs * self.arena.slab_bytes + self.start + there * self.block_bytes
        return slice(start, start + self.block_bytes)


class FakeForwarded(NamedTuple):
    contexts: list[tuple[int, ...]]  # for each row of logits, the tokens up to it
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]]


class FakeRunner:
    """A runner that records the last write to each slot, and fails if a chunk would read anything but the prefix of its sequence."""

    num_graphs = graph_failures = 0

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        memory: FakeMemory | None = None,
        depth: int = 1,
        windows: Windows = (None,),
        copies: int = 1,
        has_states: bool = False,
    ) -> None:
        """Prepare a runner. With `has_states` the last group of layers keeps a state, stored in all slots of a block."""
        self.state_group = len(windows) - 1 if has_states else None
        self.copies = copies
        self.windows = windows
        self.memory = memory
        self.block_size = block_size
        self.depth = depth
        self.chosen: list[int] = []  # the tokens of the last step, as on the device
        self.slots: list[tuple[int, ...] | None] = [None] * (num_blocks * block_size)
        self.scrubbed: list[int] = []
        self.bad_prompts: set[tuple[int, ...]] = set()  # after these prompts, logits are not finite
        self.explode = False
        self.poisons: set[tuple[int, ...]] = set()  # a step raises if a prompt in it begins like this
        self.num_failures = 0
        self.batch_tokens: list[int] = []
        self.num_drafts = 0

    def forward(self, step: StepInput) -> FakeForwarded:
        if self.explode:
            raise RuntimeError("the device is on fire")
        self.batch_tokens.append(len(step.token_ids))
        self.num_drafts += sum(n - 1 for n in step.lengths[: step.num_decodes])
        fed = dict(step.feeds)
        token_ids = [self.chosen[fed[i]] if i in fed else token for i, token in enumerate(step.token_ids)]
        assert {i for i, token in enumerate(step.token_ids) if token == PENDING} == set(fed)
        contexts: list[tuple[int, ...]] = []
        firsts = list(accumulate(step.lengths, initial=0))
        for table, first, end in zip(step.groups[0].tables, firsts, firsts[1:], strict=False):
            start = step.positions[first]
            before = self.slots[self._slot(table, start - 1)] if start else ()
            assert before is not None, "a chunk would read a slot that was never written"
            assert len(before) == start, "foreign or stale cache content"
            contexts += [(*before, *token_ids[first : i + 1]) for i in range(first, end)]
        if self.state_group is not None:  # before a failure: a failed step may have changed states
            self._change_states(step, contexts, firsts)
        if any(context[: len(bad)] == bad for context in contexts for bad in self.poisons):
            self.num_failures += 1
            raise RuntimeError("a prompt that no device computes")
        for chunk, tables in enumerate(zip(*[group.tables for group in step.groups], strict=True)):
            shares = {block % self.copies for blocks in tables for block in blocks}
            assert len(shares) == 1, f"blocks of several ranks for chunk {chunk}"
        slots = [slot for group in step.groups for slot in group.slots]
        assert len(set(slots)) == len(slots), "two tokens share one slot"
        for number, group in enumerate(step.groups):
            for slot, context in zip(group.slots, contexts, strict=True):
                if number != self.state_group:
                    self.slots[slot] = _content(context, number)
                if self.memory is not None:
                    self.memory.write(slot // self.block_size)
        for number, (group, window) in enumerate(zip(step.groups, self.windows, strict=True)):
            if number == self.state_group:
                continue
            ends = zip(group.tables, [step.positions[i] for i in firsts[:-1]], firsts[1:], strict=True)
            for table, start, end in ends:  # after all writes, so that overwritten blocks are noticed
                self._read(table, contexts[end - 1], number, 0 if window is None else max(0, start + 1 - window))
        rows = range(len(token_ids)) if step.logit_rows is None else step.logit_rows
        prompts = {
            asked.chunk: tuple(prompt_logprob(contexts[asked.row + i]) for i, _ in enumerate(asked.token_ids))
            for asked in step.prompt_logprobs
        }
        return FakeForwarded([contexts[row] for row in rows], prompts)

    def choose(self, forwarded: FakeForwarded, rows: SequenceOf[ChoiceRow]) -> "FakeLaunched":
        tokens = []
        for row in rows:
            context = forwarded.contexts[row.row]
            assert row.position == len(context)
            is_finite = not any(context[: len(bad)] == bad for bad in self.bad_prompts)
            token_id = (next_token(context) + self._penalty(row)) % VOCAB
            logprobs = None if row.sampling.num_logprobs is None else TokenLogprobs(-float(token_id))
            tokens.append(SampledToken(token_id, is_finite, logprobs))
        self.chosen = [token.token_id for token in tokens]
        return FakeLaunched(RunResult(tokens, forwarded.prompt_logprobs, {}, 0.0))

    def scrub(self, blocks: SequenceOf[int]) -> None:
        self.scrubbed += blocks
        for block in blocks:
            self.slots[block * self.block_size : (block + 1) * self.block_size] = [None] * self.block_size

    def reset(self) -> None:
        self.slots = [None] * len(self.slots)

    def _change_states(self, step: StepInput, contexts: list[tuple[int, ...]], firsts: list[int]) -> None:
        """Check the state before each chunk, then store the state after its last token in every block that the chunk's tokens reach."""
        assert self.state_group is not None
        size, tables = self.block_size, step.groups[self.state_group].tables
        chunks = [
            (table, step.positions[first], contexts[end - 1])
            for table, first, end in zip(tables, firsts, firsts[1:], strict=False)
        ]
        for table, start, context in chunks:
            before = table[(start - 1) // size] * size if start else -1
            assert not start or self.slots[before] == _content(context[:start], self.state_group), (
                "the block has the state of another prefix"
            )
        for number, (table, start, context) in enumerate(chunks):
            place = start // size
            ends = [*range((place + 1) * size, len(context), size), len(context)]
            if step.checks_drafts and number < step.num_decodes:  # the state after each draft has a block
                ends = [*range(start + 1, len(context) + 1)]
            for block, end in zip(table[place:], ends, strict=False):
                self.slots[block * size : (block + 1) * size] = [_content(context[:end], self.state_group)] * size

    def _read(self, table: SequenceOf[int], context: tuple[int, ...], group: int, first: int) -> None:
        for position in range(first, len(context)):
            slot = self._slot(table, position)
            assert self.slots[slot] == _content(context[: position + 1], group), "foreign or stale cache content"
            if self.memory is not None:
                self.memory.check(slot // self.block_size)

    def _penalty(self, row: ChoiceRow) -> int:
        """Return the sum of the sequence's output tokens, from its counts."""
        if row.counts is None:
            return 0
        return sum(token * round(n) for token, n in zip(row.counts.token_ids, row.counts.num_outputs, strict=True))

    def _slot(self, table: SequenceOf[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size


def _content(context: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Return the content of a slot: the values that determine its keys and values."""
    return (-group, *context) if group else context


class FakeLaunched:
    def __init__(self, result: RunResult) -> None:
        self._result = result

    def collect(self) -> RunResult:
        return self._result


def fake_engine(
    num_blocks: int = 32,
    block_size: int = 4,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    max_waiting: int = 100,
    eos_token_ids: tuple[int, ...] = (),
    depth: int = 1,
    make_tiers: Callable[[FakeRunner], Tiers] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    max_decode_delay_s: float = math.inf,
    speculation: Speculation | None = None,
    windows: Windows = (None,),
    copies: int = 1,
    images: ImageEncoder | None = None,
    has_states: bool = False,
    most_unmeasured: float = math.inf,
    runner_type: type[FakeRunner] = FakeRunner,
) -> tuple[Engine, FakeRunner]:
    """Return an engine with a FakeRunner.

    `num_blocks`: the number of blocks of each group of layers on each rank. `copies`: the number of ranks, each with separate sequences.
    """
    in_all = copies * num_blocks * len(windows)
    runner = runner_type(in_all, block_size, None, depth, windows, copies, has_states)
    limits = SchedulerLimits(
        block_size,
        max_num_batched_tokens,
        max_num_seqs,
        max_waiting,
        max_decode_delay_s,
        windows,
        copies=copies,
        has_states=has_states,
        most_unmeasured=most_unmeasured,
    )
    info = _info("tiny", in_all, limits, eos_token_ids)
    if images is not None:
        info = replace(info, image_token_id=images.placeholder)
    tiers = make_tiers(runner) if make_tiers else None
    return Engine(info, runner, limits, clock=clock, tiers=tiers, speculation=speculation, images=images), runner


def borrowing_engine(
    arena: FakeArena,
    name: str,
    block_bytes: int,
    block_size: int = 4,
    tokens: int = 64,
    seqs: int = 8,
    depth: int = 1,
    make_tiers: Callable[[FakeRunner], Tiers] | None = None,
    speculation: Speculation | None = None,
    windows: Windows = (None,),
) -> tuple[Engine, FakeRunner]:
    lease, copies = arena.slabs.open(name, block_bytes, arena.copies), arena.copies
    runner = FakeRunner(lease.grid.capacity, block_size, FakeMemory(arena, name, block_bytes), depth, windows, copies)
    limits = SchedulerLimits(block_size, tokens, seqs, max_waiting=100, windows=windows, copies=copies)
    info = _info(name, lease.max_blocks, limits)
    tiers = make_tiers(runner) if make_tiers else None
    return Engine(info, runner, limits, lease, tiers=tiers, speculation=speculation), runner


def _info(name: str, num_blocks: int, limits: SchedulerLimits, eos_token_ids: tuple[int, ...] = ()) -> ModelInfo:
    return ModelInfo(
        name=name,
        context_length=limits.groups.longest_context(num_blocks // limits.copies, num_blocks * limits.block_size),
        vocab_size=VOCAB,
        eos_token_ids=eos_token_ids,
        dtype="float32",
        block_size=limits.block_size,
        total_blocks=num_blocks // len(limits.windows),
        weights_bytes=0,
        load_s=0.0,
    )
