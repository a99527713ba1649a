"""Which sequences compute which tokens in the next step, and which blocks they get for it.

Knows lengths, blocks and order; refuses to know tensors, models and clients. Running decodes come first, then prompt
chunks of running sequences, then waiting ones, until the token budget is spent. Who is admitted next is fairness.py's
business. When blocks run out the youngest running sequence is preempted: it gives its blocks back, keeps its tokens
and waits before the others of its tenant. No sequence is preempted for a younger one, whatever their priorities, so
the oldest running one always advances, and an admission that ageing won is not lost to the next more urgent arrival.
"""

from bisect import insort
from typing import NamedTuple

from engine.fairness import FairQueue
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_index import extend_chain
from engine.sequence import Sequence
from engine.siblings import Siblings


class Limits(NamedTuple):
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_waiting: int
    is_whole: bool = False  # every prompt in one step, nothing cached: an encoder's tokens all see each other


class Chunk(NamedTuple):
    """Tokens start .. start + length of one sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def is_decode(self) -> bool:
        """One token behind a cached prefix, be it a new token or the rest of a prompt: the arithmetic is the same."""
        return self.length == 1 and self.start > 0

    @property
    def samples(self) -> bool:
        """The chunk reaches the newest token: its last logits choose the next one."""
        return self.is_last and self.sequence.pooling is None

    @property
    def is_last(self) -> bool:
        return self.end == len(self.sequence.token_ids)


class Scheduler:
    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.limits = limits
        self.waiting = FairQueue(limits.max_num_batched_tokens)  # a turn is worth a step's prompt tokens
        self.running: list[Sequence] = []  # ordered by arrival
        self.siblings = Siblings()  # held back until the first of their prompt has computed it
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.num_preemptions = 0
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.siblings)

    @property
    def is_full(self) -> bool:
        return self.num_waiting >= self.limits.max_waiting

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before every sequence decodes."""
        prefilling = sum(sequence.num_uncomputed_tokens for sequence in self.running if not sequence.is_decoding)
        # each sibling will find all but a few tokens cached
        return prefilling + self.waiting.num_tokens + len(self.siblings)

    def add(self, sequence: Sequence, leader: Sequence | None = None) -> None:
        """`leader`: one of the same prompt, which has not ended."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        if leader is not None and not leader.has_computed_prompt and self._sharable_blocks(sequence):
            self.siblings.hold(sequence, leader)
        else:
            self.waiting.add(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, decodes before the rest. Empty only when there is no work."""
        plan = _Plan(self.limits.max_num_batched_tokens)
        preempted = self._schedule_running(plan, [s for s in self.running if s.is_decoding])
        preempted |= self._schedule_running(plan, [s for s in self.running if not s.is_decoding])
        if not preempted:  # a sequence admitted now would take the blocks that were just cleared
            self._admit(plan)
        assert plan.chunks or not self.has_work, "sequences wait and none of them can be scheduled"
        return sorted(plan.chunks, key=lambda chunk: not chunk.is_decode)

    def advance(self, chunk: Chunk) -> None:
        """The chunk is computed: count it, and let others find the blocks it completed."""
        sequence = chunk.sequence
        sequence.num_computed_tokens = chunk.end
        extend_chain(sequence.block_hashes, sequence.chain_root, sequence.token_ids, self.limits.block_size)
        complete = chunk.end // self.limits.block_size
        for i in range(sequence.num_registered_blocks, complete):
            self.pool.register(sequence.block_table[i], sequence.block_hashes[i])
        sequence.num_registered_blocks = complete
        if sequence.has_computed_prompt:
            for sibling in self.siblings.release(sequence):
                self.waiting.add(sibling)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, for whatever reason: its blocks are available from now on."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.release(sequence.block_table)
            sequence.block_table = []
        elif not self.siblings.drop(sequence):
            self.waiting.remove(sequence)
        if orphans := self.siblings.release(sequence):  # it ended before its prompt was computed: the next one does it
            self.waiting.add(orphans[0])
            for sibling in orphans[1:]:
                self.siblings.hold(sibling, orphans[0])

    def _schedule_running(self, plan: "_Plan", sequences: list[Sequence]) -> bool:
        """Give each sequence its next chunk, oldest first. True if any sequence was preempted for it."""
        preempted = False
        for sequence in sequences:
            length = min(sequence.num_uncomputed_tokens, plan.budget)
            if length == 0:
                break
            if sequence not in self.running:
                continue  # preempted for an older one
            while not self._grow(sequence, sequence.num_computed_tokens + length):
                victim = next(s for s in reversed(self.running) if s not in plan.sequences)
                if victim is sequence:
                    break  # all that could yield are older or already at work: wait a step, keep the blocks
                self._preempt(victim)
                preempted = True
            else:
                plan.add(sequence, length)
        return preempted

    def _admit(self, plan: "_Plan") -> None:
        while self.waiting and len(self.running) < self.limits.max_num_seqs and plan.budget > 0:
            sequence = self.waiting.peek()
            if self.limits.is_whole and plan.chunks and len(sequence.token_ids) > plan.budget:
                return
            cached = self._cached_blocks(sequence)
            needed = self._num_blocks(len(sequence.token_ids)) - len(cached)
            # One spare block for each running sequence: without it the newcomer would be preempted within a few tokens.
            if needed + len(self.running) > self.pool.num_available - self.pool.num_evictable(cached):
                return  # whose turn it is keeps it: a smaller sequence behind must not starve a larger one
            self.waiting.pop(len(sequence.token_ids) - len(cached) * self.limits.block_size)
            self._start(sequence, cached)
            length = sequence.num_uncomputed_tokens
            if not self.limits.is_whole:
                length = min(length, plan.budget)
            grown = self._grow(sequence, sequence.num_computed_tokens + length)
            assert grown, "blocks counted as available were not"
            plan.add(sequence, length)

    def _start(self, sequence: Sequence, cached: list[int]) -> None:
        self.pool.hold(cached)
        sequence.block_table = cached
        sequence.num_registered_blocks = len(cached)
        sequence.num_computed_tokens = len(cached) * self.limits.block_size
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += sequence.num_cached_tokens
        insort(self.running, sequence, key=lambda s: s.arrival)

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The cached prefix, short of the last token: its logits are needed, so it is computed even when its block is
        cached."""
        if sequence.needs_every_token or self.limits.is_whole:
            return []
        extend_chain(sequence.block_hashes, sequence.chain_root, sequence.token_ids, self.limits.block_size)
        return self.pool.find_prefix(sequence.block_hashes[: self._sharable_blocks(sequence)])

    def _sharable_blocks(self, sequence: Sequence) -> int:
        return (len(sequence.token_ids) - 1) // self.limits.block_size

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Extend the block table to `num_tokens`. Blocks taken before a failure stay: the next attempt needs fewer."""
        while len(sequence.block_table) < self._num_blocks(num_tokens):
            block = self.pool.allocate()
            if block is None:
                return False
            sequence.block_table.append(block)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.block_table)
        sequence.forget_computed()
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)


class _Plan:
    """A step in the making."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: list[Chunk] = []
        self.sequences: set[Sequence] = set()

    def add(self, sequence: Sequence, length: int) -> None:
        self.chunks.append(Chunk(sequence, sequence.num_computed_tokens, length))
        self.sequences.add(sequence)
        self.budget -= length
