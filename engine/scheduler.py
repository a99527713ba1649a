"""Which sequences compute which tokens in the next step, and which blocks they get for it.

Knows lengths, blocks and order; refuses to know tensors, models and clients. Running decodes come first. The rest of the
token budget is shared equally by the tenants (each with each of its priorities) whose prompts are being computed, and
those who wait with none: a long prompt holds up nobody else's short one. What a share leaves goes to the oldest prompt. Who
is admitted next is fairness.py's business. When blocks run out the youngest running sequence is preempted: it gives its blocks back, keeps its tokens
and waits before the others of its tenant. No sequence is preempted for a younger one, whatever their priorities, so
the oldest running one always advances, and an admission that ageing won is not lost to the next more urgent arrival.
A prompt's blocks that have left the device come back from the tiers behind it (kv/tiers.py) while others compute, and a
preempted sequence's may be kept there until it resumes.

Where several models share an arena, blocks come and go through an account (kv/lending.py): each schedule first hands over what
others are due, and waits a step for blocks that another model is about to leave rather than preempt for them.
"""

from array import array
from bisect import insort
from collections import Counter
from itertools import count, islice

from engine.fairness import FairQueue
from engine.incoming import Incoming
from engine.kv.block_pool import BlockPool
from engine.kv.lending import Account, Oldest
from engine.kv.prefix_index import extend_chain
from engine.kv.tiers import Kept, NoTiers, Tiers
from engine.plan import Chunk, Limits, Plan
from engine.sequence import PENDING, Sequence
from engine.siblings import Siblings


class Scheduler:
    def __init__(
        self, pool: BlockPool, limits: Limits, account: Account | None = None, tiers: Tiers | None = None
    ) -> None:
        """`account`: where the pool's blocks come from; None: it has all that it will ever have."""
        self.pool = pool
        self.account = account
        self.limits = limits
        self.tiers = tiers or NoTiers()
        pool.on_forget = self.tiers.drop
        self.waiting = FairQueue(limits.max_num_batched_tokens)  # a turn is worth a step's prompt tokens
        self.running: list[Sequence] = []  # ordered by arrival
        self.siblings = Siblings()  # held back until the first of their prompt has computed it
        self.incoming = Incoming(self.tiers, limits.block_size)  # blocks of theirs are on their way from a tier
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.host_hits = 0  # of these, found in the host tier
        self.disk_hits = 0  # and in the disk tier
        self.num_preemptions = 0
        self.num_swaps = 0  # preemptions whose blocks were kept in the host tier
        self._arrivals = count()
        if account is not None:
            self._arrivals = account.arrivals
            account.work = self

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.incoming)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.siblings) + len(self.incoming)

    @property
    def is_full(self) -> bool:
        return self.num_waiting >= self.limits.max_waiting

    @property
    def waiting_tokens(self) -> int:
        """Tokens to compute before every sequence decodes."""
        prefilling = sum(sequence.num_uncomputed_tokens for sequence in self.running if not sequence.is_decoding)
        # each sibling will find all but a few tokens cached
        return prefilling + self.waiting.num_tokens + len(self.siblings) + self.incoming.num_tokens

    def add(self, sequence: Sequence, leader: Sequence | None = None) -> None:
        """`leader`: one of the same prompt, which has not ended."""
        sequence.arrival = next(self._arrivals)
        if leader is not None and not leader.has_computed_prompt and self._sharable_blocks(sequence):
            self.siblings.hold(sequence, leader)
        else:
            self.waiting.add(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, decodes before the rest. Empty when there is no work, when all that is running awaits
        its end, or when there is no block for it yet: other models have them, or they are on their way from a tier."""
        self._receive()
        if self.account is not None:
            self.account.begin()
        plan = Plan(self.limits.max_num_batched_tokens)
        busy = [sequence for sequence in self.running if not sequence.awaits_its_end]
        short = self._schedule_running(plan, [sequence for sequence in busy if sequence.is_decoding], plan.budget)
        prefilling = [sequence for sequence in busy if not sequence.is_decoding]
        short |= self._schedule_running(plan, prefilling, self._prompt_share(prefilling, plan.budget))
        if not short:  # a sequence admitted now would take the blocks that were just cleared, or that are awaited
            self._admit(plan)
            self._schedule_running(plan, prefilling, plan.budget)
        awaits = self.incoming or (self.account is not None and self.account.num_short > 0)
        awaits_results = any(s.is_pending or s.awaits_its_end for s in self.running)
        stuck = plan.is_empty and self.has_work and not awaits and not awaits_results
        assert not stuck, "sequences wait and none of them can be scheduled"
        return plan.chunks

    def launch(self, chunk: Chunk) -> None:
        """The chunk is about to be computed: the next step goes on from its end."""
        chunk.sequence.num_computed_tokens = chunk.end
        if chunk.samples:
            chunk.sequence.token_ids.append(PENDING)

    def complete(self, chunk: Chunk) -> None:
        """The chunk's results are here: let others find the blocks it completed."""
        sequence = chunk.sequence
        sequence.num_completed_tokens = chunk.end
        complete = chunk.end // self.limits.block_size
        if len(sequence.block_hashes) < complete:  # only of tokens that are known
            tokens = sequence.token_ids[: chunk.end]
            extend_chain(sequence.block_hashes, sequence.chain_root, tokens, self.limits.block_size)
        for i in range(sequence.num_registered_blocks, complete):
            if self.pool.register(sequence.block_table[i], sequence.block_hashes[i]):
                self.tiers.store(sequence.block_table[i], sequence.block_hashes[i])
        sequence.num_registered_blocks = complete
        if sequence.has_computed_prompt:
            for sibling in self.siblings.release(sequence):
                self.waiting.add(sibling)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, for whatever reason: its blocks are available from now on."""
        if self.incoming.call_off(sequence):
            self._look_again()
        elif sequence in self.running:
            self.running.remove(sequence)
        elif not self.siblings.drop(sequence) and not self.incoming.drop_behind(sequence):
            self.waiting.remove(sequence)
        self._release(sequence)
        self.tiers.unpin(sequence)
        self.tiers.settle(sequence.block_hashes)
        if orphans := self.siblings.release(sequence):  # it ended before its prompt was computed: the next one does it
            self.waiting.add(orphans[0])
            for sibling in orphans[1:]:
                self.siblings.hold(sibling, orphans[0])

    @property
    def is_alone(self) -> bool:
        """Nothing runs beside the oldest sequence."""
        return len(self._holders()) <= 1

    def oldest(self) -> Oldest | None:
        sequence = self._oldest()
        if sequence is None:
            return None
        return Oldest(sequence.arrival, sequence.block_table, self._num_missing(sequence))

    def preempt_youngest(self, keep_oldest: bool) -> bool:
        """For another model. False if nothing may go."""
        victim = self.running[-1] if self.running else None
        if victim is None or (keep_oldest and victim is self._oldest()):
            return False
        self._preempt(victim)
        return True

    def preempt_holders(self, blocks: range) -> None:
        """These blocks leave the model: whoever uses them computes its tokens anew elsewhere."""
        for sequence in [s for s in self._holders() if any(block in blocks for block in s.block_table)]:
            self._preempt(sequence)

    def _oldest(self) -> Sequence | None:
        """Of those that have blocks. One that waits may be older (priorities), but can only start when these leave it room:
        it counts when there is none."""
        if holders := self._holders():
            return min(holders, key=lambda sequence: sequence.arrival)
        return self.waiting.peek() if self.waiting else None

    def _holders(self) -> list[Sequence]:
        """Those that have blocks: they run, or blocks of theirs are being filled from a tier."""
        return self.running + self.incoming.fetching

    def _claim(self, num_blocks: int) -> bool:
        return self.account is not None and self.account.claim(num_blocks)

    def _prompt_share(self, prefilling: list[Sequence], budget: int) -> int:
        """Of the step's prompt tokens, for each who has some to compute; one for all who wait and have none yet."""
        sharing = {sequence.owner for sequence in prefilling}
        waits = self._num_admitted < self.limits.max_num_seqs and bool(self.waiting.owners() - sharing)
        return max(1, budget // max(1, len(sharing) + waits))

    def _schedule_running(self, plan: Plan, sequences: list[Sequence], share: int) -> bool:
        """Give each sequence its next chunk, or more of it, oldest first; `share`: tokens for all of one owner. True if blocks
        were short: a sequence was preempted for them, or another model will leave some."""
        short = False
        spent: Counter[tuple[int, bytes]] = Counter()
        for sequence in sequences:
            planned = plan.length_of(sequence)
            length = min(sequence.num_uncomputed_tokens - planned, plan.budget, share - spent[sequence.owner])
            if length == 0 or sequence not in self.running:  # preempted for an older one
                continue
            end = sequence.num_computed_tokens + planned + length
            while not self._grow(sequence, end):
                if self._claim(self._num_blocks(end) - len(sequence.block_table)):
                    short = True
                    break
                victim = next((s for s in reversed(self.running) if s not in plan), sequence)
                if victim is sequence:
                    break  # all that could yield are older or already at work: wait a step, keep the blocks
                self._preempt(victim)
                short = True
            else:
                plan.add(sequence, length)
                spent[sequence.owner] += length
        return short

    def _admit(self, plan: Plan) -> None:
        while self.waiting and self._num_admitted < self.limits.max_num_seqs and plan.budget > 0:
            sequence = self.waiting.peek()
            if self.limits.is_whole and not plan.is_empty and len(sequence.token_ids) > plan.budget:
                return
            cached = self._cached_blocks(sequence)
            needed = self._num_blocks(len(sequence.token_ids)) - len(cached)
            # What each running sequence still lacks, and one spare block at least: without it the newcomer would be preempted soon.
            needed += sum(max(1, self._num_missing(holder)) for holder in self._holders())
            self.pool.make_room(needed)
            missing = needed - self.pool.num_available + self.pool.num_evictable(cached)
            if missing > 0:
                self._claim(missing)
                return  # whose turn it is keeps it: a smaller sequence behind must not starve a larger one
            kept = self._kept_blocks(sequence, len(cached))
            if self._steps_aside(sequence, len(cached), kept):
                continue
            self.waiting.pop(len(sequence.token_ids) - (len(cached) + kept.num_blocks) * self.limits.block_size)
            self._take(sequence, cached)
            if kept.num_blocks:
                self._fetch(sequence, kept.num_blocks)
                continue
            self._start(sequence)
            length = sequence.num_uncomputed_tokens
            if not self.limits.is_whole:
                length = min(length, plan.budget)
            grown = self._grow(sequence, sequence.num_computed_tokens + length)
            assert grown, "blocks counted as available were not"
            plan.add(sequence, length)

    @property
    def _num_admitted(self) -> int:
        return len(self._holders())

    def _take(self, sequence: Sequence, cached: list[int]) -> None:
        self.pool.hold(cached)
        sequence.block_table = array("q", cached)
        sequence.block_generations = array("q", [self.pool.generations[block] for block in cached])
        sequence.num_registered_blocks = len(cached)

    def _start(self, sequence: Sequence, num_fetched: int = 0) -> None:
        """`num_fetched`: of its registered blocks, the last ones, which came from the tiers."""
        self.tiers.unpin(sequence)
        self.tiers.touch(sequence.block_hashes[: sequence.num_registered_blocks])
        num_tokens = sequence.num_registered_blocks * self.limits.block_size
        sequence.num_computed_tokens = sequence.num_completed_tokens = num_tokens
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            num_from_disk = min(sequence.num_disk_blocks or 0, num_fetched)
            self.prefix_queries += sequence.num_prompt_tokens
            self.prefix_hits += sequence.num_cached_tokens
            self.host_hits += (num_fetched - num_from_disk) * self.limits.block_size
            self.disk_hits += num_from_disk * self.limits.block_size
        insort(self.running, sequence, key=lambda s: s.arrival)

    def _kept_blocks(self, sequence: Sequence, num_cached: int) -> Kept:
        """How far its prompt goes on in the tiers."""
        if sequence.needs_every_token or self.limits.is_whole:
            return Kept()
        hashes = sequence.block_hashes[num_cached : self._sharable_blocks(sequence)]
        return self.tiers.lookup(hashes, with_disk=sequence.num_disk_blocks is None)

    def _steps_aside(self, sequence: Sequence, num_cached: int, kept: Kept) -> bool:
        """It waits, without blocks, for what is read from disk or fetched for another; those behind it may go first."""
        if kept.num_blocks and self.incoming.is_coming(sequence.block_hashes[num_cached]):
            self.waiting.remove(sequence)
            self.incoming.wait_behind(sequence)
            return True
        if kept.num_on_disk:
            self.waiting.remove(sequence)
            self.incoming.read(sequence, num_cached, kept.num_blocks)
            return True
        return False

    def _fetch(self, sequence: Sequence, num_blocks: int) -> None:
        num_cached = len(sequence.block_table)
        grown = self._grow(sequence, (num_cached + num_blocks) * self.limits.block_size)
        assert grown, "blocks counted as available were not"
        self.incoming.fetch(sequence, num_cached)

    def _receive(self) -> None:
        """What has come from the tiers since the last step."""
        done = self.incoming.take_done()
        for sequence, transfer, is_fetch, num_cached, _ in done:
            if not is_fetch:
                sequence.num_disk_blocks = self.tiers.take_read(sequence, transfer)
                self.waiting.add(sequence)
                continue
            sequence.num_registered_blocks = num_cached + transfer.num_blocks
            for i in range(num_cached, sequence.num_registered_blocks):
                self.pool.register(sequence.block_table[i], sequence.block_hashes[i])
            self._start(sequence, transfer.num_blocks)
        if done:
            self._look_again()

    def _look_again(self) -> None:
        for sequence in self.incoming.take_behind():
            self.waiting.add(sequence)

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
            sequence.block_generations.append(self.pool.generations[block])
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if self.incoming.call_off(sequence):
            self._look_again()
        else:
            self.running.remove(sequence)
        self._swap_out(sequence)
        self._release(sequence)
        sequence.forget_computed()
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _swap_out(self, sequence: Sequence) -> None:
        if sequence.wants_prompt_logprobs:
            return  # it will compute all of them again
        generations = self.pool.generations
        table = zip(sequence.block_table, sequence.block_generations, sequence.block_hashes, strict=False)
        kept = [
            (block, block_hash)
            for block, generation, block_hash in islice(table, sequence.num_registered_blocks)
            if generations[block] == generation  # what was handed to another must not be kept under this one's name
        ]
        hashes, blocks = [block_hash for _, block_hash in kept], [block for block, _ in kept]
        self.num_swaps += self.tiers.swap_out(sequence, hashes, blocks)

    def _release(self, sequence: Sequence) -> None:
        """Give back what is the sequence's. A block whose generation rose is somebody else's, by a mistake of ours: who
        holds it is counted."""
        generations = self.pool.generations
        table = list(zip(sequence.block_table, sequence.block_generations, strict=True))
        self.pool.release([block for block, generation in table if generations[block] == generation])
        sequence.forget_blocks()
        for lost in [block for block, generation in table if generations[block] != generation]:
            holding = [
                pair
                for other in self._holders()
                for pair in zip(other.block_table, other.block_generations, strict=True)
                if pair == (lost, generations[lost])
            ]
            self.pool.recount(lost, len(holding))

    def _num_missing(self, sequence: Sequence) -> int:
        """Blocks until all its tokens have a place."""
        return self._num_blocks(len(sequence.token_ids)) - len(sequence.block_table)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)
