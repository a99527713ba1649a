"""Chooses the sequences and tokens of the next step, and the blocks that they get for it.

This module is independent of tensors, models and clients. Running decodes come first. Prompts share what is left (prompt_shares.py), so that a long
one does not delay another tenant's short one; in a step with decodes they get only as many tokens as the allowed delay permits. fairness.py chooses
the sequence that is admitted next. When blocks run out the youngest running sequence is preempted (preemption.py). A prompt's blocks that have left
the device come back from the tiers (kv/connector.py) while others compute, and those of a preempted sequence may be kept there until it resumes.

If several models share an arena, blocks come and go through a lease (../kv/lending/lease.py): each schedule first hands over blocks that are due to
other models. If another model is about to return blocks, the scheduler waits a step for them instead of preempting a sequence.

If ranks have separate sequences, a sequence belongs to one rank while it has blocks, which are all in that rank's share of the pool.
"""

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable
from itertools import count
from operator import attrgetter

from pilotlight.engine.core.bisection import Turn
from pilotlight.engine.core.sequence import PENDING, Arrival, Sequence
from pilotlight.engine.kv.connector import KVConnector
from pilotlight.engine.kv.lending.lease import Lease
from pilotlight.engine.kv.manager import BlockManager
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.cached_prefix import CachedPrefix, PrefixLookup
from pilotlight.engine.kv.tier_protocol import Tiers
from pilotlight.engine.scheduling.awaited import Awaited
from pilotlight.engine.scheduling.plan import ROW_TILE, Chunk, SchedulerLimits, Speculation, StepPlan
from pilotlight.engine.scheduling.preemption import Preemption
from pilotlight.engine.scheduling.prompt_shares import PromptShares
from pilotlight.engine.scheduling.scheduler_counts import SchedulerCounts
from pilotlight.engine.scheduling.waiting import WaitingSequences
from pilotlight.support.estimates import LAST_CHUNK_TOKENS


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        lease: Lease | None = None,
        tiers: Tiers | None = None,
        clock: Callable[[], float] = time.perf_counter,
        speculation: Speculation | None = None,
        counts: SchedulerCounts | None = None,
        is_computable: "Callable[[Chunk, Scheduler], bool]" = lambda chunk, scheduler: True,
    ) -> None:
        """Prepare to schedule one model.

        `lease`: the source of the pool's blocks, or None if the pool already has all of them. `counts`: counts of an earlier scheduler, to continue.
        `is_computable`: returns whether a sequence has what it needs for a chunk of its prompt; if not, it defers or ends the sequence.
        """
        self.pool = pool
        self.lease = lease
        self.limits = limits
        self.waiting = WaitingSequences(limits.max_num_batched_tokens)  # a tenant's turn is as many tokens as a step
        self.running: list[Sequence] = []  # ordered by arrival
        self._shares = PromptShares(limits.block_size)
        self.counts = SchedulerCounts() if counts is None else counts
        tiers = tiers or Tiers()
        self.blocks = BlockManager(pool, tiers, limits.groups, limits.has_states)
        self._prefixes = PrefixLookup(pool, tiers, limits.groups, shares_prefixes=not limits.whole_prompts)
        self.connector = KVConnector(tiers, self.blocks, limits.groups, self.counts, clock)
        self.preemption = Preemption(self.running, self.waiting, self.blocks, self.counts)
        self._clock = clock
        self._is_computable = is_computable
        self.speculation = speculation
        self._arrivals = count()
        if lease is not None:
            self._arrivals = lease.arrivals
            lease.serve(self.preemption)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= self.limits.max_waiting

    @property
    def waiting_tokens(self) -> int:
        """Return the number of tokens to compute until all present sequences decode."""
        prefilling = sum(sequence.num_uncomputed_tokens for sequence in self.running if not sequence.is_decoding)
        return prefilling + self.waiting.num_tokens

    def add(self, sequence: Sequence, leader: Sequence | None = None, awaited: Awaited | None = None) -> None:
        """Queue a new sequence.

        `leader`: an open sequence with the same prompt. `awaited`: the wait that must end before it can be admitted, if any.
        """
        sequence.added_at, sequence.replays = self._clock(), self.limits.replays
        sequence.arrival = Arrival(sequence.added_at - sequence.waited_s, next(self._arrivals))
        if leader is not None and (leader.has_computed_prompt or not self._prefixes.num_sharable(sequence)):
            leader = None
        self.waiting.add(sequence, leader, awaited)

    def defer(self, awaited: Awaited) -> None:
        """Let a sequence wait without blocks, then return to its old place in the queue.

        Samples that wait for this sequence's prompt continue to wait.
        """
        self._forget(awaited.sequence)
        awaited.sequence.forget_computed()
        self.waiting.defer(awaited)

    def schedule(
        self, most_beside_decodes: float = math.inf, turn: Turn | None = None, *, is_measured: bool = True
    ) -> list[Chunk]:
        """Return the next step's chunks, decodes before the rest.

        Returns no chunks if there is no work, or if all sequences wait: for results, for a thread, or for blocks that other models have or a tier is
        reading. `most_beside_decodes`: limit of prompt tokens in a step with decodes; it is raised to a block, then rounded down to whole tiles of
        rows. `turn`: the sequences that may run while some are suspected of failures; None if none are. `is_measured`: the speed of
        prompts is known.
        """
        for sequence in self.waiting.take_admitted(self._clock()):
            self._start(sequence)
        if self.lease is not None:
            self.lease.begin_schedule()
        plan = StepPlan(self.limits.max_num_batched_tokens, self._reserve)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            if turn is not None and not turn.may_run(sequence):
                continue
            if ready := sequence.num_ready_tokens:
                (decoding if ready == 1 and sequence.num_computed_tokens else prefilling).append(sequence)
        if self.limits.stages > 1:
            num_decoding = sum(sequence.is_decoding for sequence in self.running)
            decoding = decoding[: -(-num_decoding // self.limits.stages)]
        short = self._schedule_running(plan, decoding)
        if not plan.is_empty or any(sequence.awaits_tokens for sequence in self.running):
            plan.limit(max(self.limits.block_size, most_beside_decodes))
        if not is_measured:
            plan.budget = int(min(plan.budget, self.limits.most_unmeasured))
        short |= self._schedule_prompts(plan, prefilling, keeps_share=True)
        if not short:  # a sequence admitted now would take the blocks that were just freed, or that are awaited
            self._admit(plan, turn)
            self._schedule_prompts(plan, prefilling, keeps_share=False)
        awaits_lender = self.lease is not None and self.lease.num_short > 0
        # the prompts with a share lack blocks that older prompts hold: let the older ones continue without shares
        if plan.is_empty and not awaits_lender:
            self._schedule_running(plan, prefilling)
        self._add_drafts(plan)
        if plan.is_empty and self.has_work and turn is None:
            awaits = self.waiting.awaiting or awaits_lender
            awaits_results = any(s.num_completed_tokens < s.num_computed_tokens for s in self.running)
            assert awaits or awaits_results, "sequences wait and none of them can be scheduled"
        return plan.chunks

    def launch(self, chunk: Chunk, is_fed: bool = False) -> None:
        """Record that the chunk is about to be computed: the next step starts at its end.

        `is_fed`: the token that it chooses can be the next step's input before the host knows it.
        """
        sequence = chunk.sequence
        sequence.num_computed_tokens = chunk.end
        if chunk.samples:
            sequence.token_ids.append(PENDING)
            sequence.awaits_tokens = bool(chunk.drafts) or not is_fed

    def complete(self, chunk: Chunk, num_accepted: int = 0) -> None:
        """Record that the chunk's results have arrived, and publish its completed blocks in the prefix cache.

        `num_accepted`: number of its drafts that were right.
        """
        sequence = chunk.sequence
        sequence.num_completed_tokens = chunk.end + num_accepted
        if chunk.drafts:
            self.blocks.settle_drafts(sequence, chunk.start, num_accepted)
        if num_accepted:
            sequence.num_computed_tokens = sequence.num_completed_tokens
        if sequence.token_ids[-1] != PENDING:  # otherwise a later chunk of the sequence is in flight
            sequence.awaits_tokens = False
        self.blocks.complete(sequence, sequence.num_completed_tokens)
        if chunk.start < sequence.num_prompt_tokens and sequence.has_computed_prompt:
            self.waiting.release_samples(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, for any reason, and release its blocks."""
        self._forget(sequence)
        self.connector.on_end(sequence)
        self.waiting.replace_leader(sequence)
        if self.speculation is not None:
            self.speculation.forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.blocks.release(sequence, self.preemption.holders)

    def discard(self, sequence: Sequence) -> list[int]:
        """Remove a sequence's blocks from the prefix cache; return those that no other sequence shares."""
        return self.blocks.discard(sequence)

    def _reclaim(self, num_blocks: int) -> bool:
        return self.lease is not None and self.lease.reclaim(num_blocks)

    def _schedule_prompts(self, plan: StepPlan, sequences: list[Sequence], *, keeps_share: bool) -> bool:
        """Give each owner its share of the tokens that are left. Returns True if blocks were short.

        `keeps_share`: leave over the shares of waiting sequences that could be admitted.
        """
        sequences = [
            sequence for sequence in sequences if sequence.tables
        ]  # sequences without tables have lost their blocks in this schedule
        if not sequences:
            return False
        wanted: Counter[tuple[int, bytes]] = Counter()
        for sequence in sequences:
            wanted[sequence.owner] += sequence.num_uncomputed_tokens - plan.length_of(sequence)
        waiting: set[int] = set()
        if keeps_share and len(self.preemption.holders()) < self.limits.max_num_seqs:
            waiting = {priority for priority, _ in self.waiting.ready.owners() - wanted.keys()}
        return self._schedule_running(plan, sequences, self._shares.divide(plan.budget, wanted, waiting))

    def _schedule_running(
        self, plan: StepPlan, sequences: list[Sequence], shares: Counter[tuple[int, bytes]] | None = None
    ) -> bool:
        """Give each sequence its next chunk, or more of it, oldest first.

        `shares`: tokens that each owner has left for all of its sequences. Returns True if blocks were short: a sequence was preempted for them, or
        another model will return some.
        """
        short = False
        for sequence in sequences:
            planned = 0 if shares is None else plan.length_of(sequence)
            most = min(_num_in_step(sequence, sequence.num_computed_tokens) - planned, plan.budget)
            if shares is not None:
                most = min(most, shares[sequence.owner])
            if most <= 0 or not sequence.tables:  # without tables it was preempted for an older one
                continue
            start = sequence.num_computed_tokens + planned
            length = plan.room_for(sequence, start, most)
            if length == 0:
                continue
            end = start + length
            if not self._may_plan(sequence, sequence.num_computed_tokens, end):
                plan.drop(sequence)
                continue
            while not self.blocks.grow(sequence, end):
                if self._reclaim(self.blocks.num_lacking(sequence, end)):
                    short = True
                    break
                if not self.preemption.preempt_for(sequence, plan):
                    break  # wait a step, keep the blocks
                short = True
            else:
                plan.add(sequence, length, within=most)
                if shares is not None:
                    shares[sequence.owner] -= min(length, most)
                    self._shares.charge(sequence.owner, max(0, length - most))
        return short

    def _add_drafts(self, plan: StepPlan) -> None:
        """Let decoding sequences check drafts with the rest of the budget and of the blocks."""
        if self.speculation is None or plan.budget <= 0:
            return
        for sequence, drafts in self.speculation.drafts(plan).items():
            if self._reserve(sequence, len(sequence.token_ids) + len(drafts)):
                plan.add_drafts(sequence, drafts[: self.blocks.reserve_drafts(sequence, len(drafts))])

    def _reserve(self, sequence: Sequence, end: int) -> bool:
        """Give a sequence blocks for `end` tokens if no other sequence must give up blocks for that."""
        available = self.pool.num_available_in(sequence.share)
        return self.blocks.num_lacking(sequence, end) <= available and self.blocks.grow(sequence, end)

    def _admit(self, plan: StepPlan, turn: Turn | None) -> None:
        while self.waiting.ready and len(self.preemption.holders()) < self.limits.max_num_seqs and plan.budget > 0:
            sequence = self.waiting.ready.peek()
            if turn is not None and not turn.may_admit(sequence):
                return
            if self.limits.whole_prompts and not plan.is_empty and len(sequence.token_ids) > plan.budget:
                return
            self._choose_share(sequence)
            if awaited := self._ask_elsewhere(sequence):
                self.waiting.ready.remove(sequence)
                self.waiting.defer(awaited)
                continue
            prefix = self._prefixes.find_cached(sequence)
            missing = self._num_short(sequence, prefix)
            if missing > 0:
                self._reclaim(missing)
                return  # this sequence keeps its turn: smaller sequences after it must not starve it
            if self.connector.may_wait(sequence):
                longer = self._prefixes.find_in_tiers(sequence, prefix)
                if longer is not prefix and self._num_short(sequence, longer) <= 0:
                    prefix = longer
            awaited = self.connector.defer(sequence, prefix)
            if awaited is not None:  # sequences after it may be admitted first
                self.waiting.ready.remove(sequence)
                self.waiting.defer(awaited)
                continue
            start = prefix.num_blocks * self.limits.block_size
            most = len(sequence.token_ids) if self.limits.whole_prompts else plan.budget
            most = min(_num_in_step(sequence, start), most)
            length = plan.room_for(sequence, start, most)
            if length == 0:
                return
            if not self._may_plan(sequence, start, start + length):
                continue
            self.waiting.ready.pop(len(sequence.token_ids) - start)
            fresh = self.blocks.take(sequence, prefix)
            if fresh:
                self.waiting.defer(self.connector.fetch(sequence, prefix, fresh))
                continue
            self._start(sequence)
            if turn is not None and not turn.may_run(sequence):
                continue
            grown = self.blocks.grow(sequence, start + length)
            assert grown, "blocks counted as available were not"
            plan.add(sequence, length, within=most)

    def _may_plan(self, sequence: Sequence, start: int, end: int) -> bool:
        """True if a prompt's tokens may join the step.

        The check may remove sequences from the queues, which then wait for something or have ended.
        """
        if start >= sequence.num_prompt_tokens:
            return True
        return self._is_computable(Chunk(sequence, start, end, samples=False), self)

    def _choose_share(self, sequence: Sequence) -> None:
        """Choose the rank of a sequence without blocks: the one with room that will hold fewest blocks.

        Cached blocks of the sequence count for a rank, so that a prefix is used, until another rank has so much less to do that computing it there
        again pays off.
        """
        if len(self.pool.shares) == 1:
            return

        def cost(share: int) -> tuple[int, int]:
            sequence.share = share
            prefix = self._prefixes.find_cached(sequence)
            held = self.pool.num_held_in(share) + self.blocks.num_needed(sequence, prefix)
            return max(0, self._num_short(sequence, prefix)), held

        sequence.share = min(self.pool.shares, key=cost)

    def _ask_elsewhere(self, sequence: Sequence) -> Awaited | None:
        """Request the sequence's blocks from the host that computed its prompt, or from the store, once each.

        Returns what to wait for, or None if nothing was requested.
        """
        awaited = None
        if sequence.source is not None:
            awaited = self.connector.ask(sequence, self._prefixes.names_elsewhere(sequence))
        if awaited is None and self.connector.may_look_up(sequence):
            awaited = self.connector.look_up(sequence, self._prefixes.names_unknown(sequence))
        return awaited

    def _num_short(self, sequence: Sequence, prefix: CachedPrefix) -> int:
        """Return how many blocks are missing before the sequence may be admitted."""
        # Reserve what each running sequence still lacks, at least one spare block: otherwise the new one would soon be preempted.
        needed = self.blocks.num_needed(sequence, prefix)
        share = sequence.share
        others = [holder for holder in self.preemption.holders() if holder.share == share]
        needed += sum([self.blocks.num_spare(holder) for holder in others])
        self.pool.make_room(needed, share)
        return needed - self.pool.num_available_in(share) + self.pool.num_evictable(prefix.cached)

    def _start(self, sequence: Sequence) -> None:
        """Let an admitted sequence run; it starts after its registered blocks."""
        self.connector.on_start(sequence)
        num_tokens = sequence.num_registered_blocks * self.limits.block_size
        sequence.num_computed_tokens = sequence.num_completed_tokens = num_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = num_tokens
            sequence.queue_us = int(1e6 * (self._clock() - sequence.added_at))
            self.counts.prefix_queries += sequence.num_prompt_tokens
            self.counts.prefix_hits += num_tokens
        insort(self.running, sequence, key=attrgetter("arrival"))


def _num_in_step(sequence: Sequence, start: int) -> int:
    """Return how many tokens of a sequence from `start` on a step may have.

    A prompt that is handed over ends with a short chunk, of LAST_CHUNK_TOKENS. Replayed output tokens are in separate chunks.
    """
    uncomputed = len(sequence.token_ids) - start
    if sequence.replays:
        uncomputed = min(uncomputed, sequence.first_output - start if start < sequence.first_output else ROW_TILE)
    return uncomputed - LAST_CHUNK_TOKENS if sequence.hands_over and uncomputed > LAST_CHUNK_TOKENS else uncomputed
