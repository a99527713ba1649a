"""One model's engine: sequences in, one step at a time, tokens out.

A step is two launches: the forward pass, and the choice of tokens. On a GPU, steps overlap: the forward pass of the next step is queued after the
choice of the previous one. During that forward pass the host publishes the previous step's tokens and prepares the next choice's penalties. A
sequence that ended in the previous step is then computed once too often, but no token is chosen for it.

This module decides the order of a step's parts, and which sequences continue after a step fails. It is independent of sockets, processes and tensors.
publishing.py handles a step's results, requirements.py what a sequence needs before it is computed.
"""

import time
from collections.abc import Callable

from pilotlight.engine.adapters.adapter_residency import AdapterStore
from pilotlight.engine.api.protocol import NO_DRAFTS, PRIORITIES, ErrorCode, ModelInfo, ModelLoad, Submit
from pilotlight.engine.api.step_journal import NOTHING_HELD, HeldSequences
from pilotlight.engine.api.struct import replace
from pilotlight.engine.api.validation import refusal
from pilotlight.engine.core.bisection import Suspects
from pilotlight.engine.core.in_flight import ForwardedStep, InFlightSteps
from pilotlight.engine.core.open_sequences import OpenSequences, error_output
from pilotlight.engine.core.publishing import Publisher
from pilotlight.engine.core.requirements import Requirements
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.core.stats import EngineStats, PublishedStep
from pilotlight.engine.core.step_runner import Runner
from pilotlight.engine.grammar.constraints import Grammars
from pilotlight.engine.images.image_residency import ImageEncoder
from pilotlight.engine.kv.lending.lease import Lease
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.prefix_index import CacheIdentity, chain_root
from pilotlight.engine.kv.tier_protocol import Tiers
from pilotlight.engine.scheduling.plan import Chunk, SchedulerLimits, Speculation, StepCount
from pilotlight.engine.scheduling.scheduler import Scheduler


class Engine:
    def __init__(
        self,
        info: ModelInfo,
        runner: Runner,
        limits: SchedulerLimits,
        lease: Lease | None = None,
        clock: Callable[[], float] = time.perf_counter,
        identity: CacheIdentity | None = None,
        tiers: Tiers | None = None,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
        adapters: AdapterStore | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        """Prepare to serve one model.

        `lease`: the model borrows blocks from an arena; None if it owns `info.total_blocks`. `identity`: required if `tiers` outlive the engine.
        `speculation`: guesses tokens that a step then verifies. `adapters`, `images`: the store of adapters and the encoder of images; None if the
        model has none.
        """
        self.info = info
        self.runner = runner
        self.tiers = tiers or Tiers()
        self.sequences = OpenSequences(self._take_back)
        self.requirements = Requirements(info, self.sequences, clock, grammars, adapters, images)
        self.identity = identity or CacheIdentity(info.name, info.dtype, info.block_size)
        # the context length as long as other models reserve no more of the arena than at the start
        self._longest_context = info.context_length
        self.speculation = speculation
        self.stats = EngineStats()
        self._clock = clock
        self.in_flight = InFlightSteps(runner, limits.block_size, clock)
        self._suspects = Suspects()
        self._chunks: list[Chunk] | None = None  # chunks of the step being launched; None if not known yet
        self._begin_anew(limits, lease)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def submit(self, submit: Submit) -> None:
        """Queue a sequence, or send an error output if it is refused."""
        assert submit.sequence_id not in self.sequences, "an output for this id would end the open sequence"
        self._refresh_limits()
        refused = refusal(submit, self.info)
        if self.scheduler.is_full:
            num_waiting = self.scheduler.limits.max_waiting
            refused = "overloaded", f"{num_waiting} sequences already wait for {self.info.name}; try again later"
        if refused:
            self.sequences.tell(error_output(submit.sequence_id, *refused))
            return
        images = self.requirements.images_of(submit)
        if images is None:
            message = "an image was sent without its data and is not cached; send it again with its data"
            self.sequences.tell(error_output(submit.sequence_id, "images_missing", message))
            return
        sequence = Sequence(
            submit.sequence_id,
            list(submit.prompt_token_ids),
            submit.sampling,
            num_delivered_tokens=submit.num_delivered_tokens,
            tenant=submit.salt,
            # A sequence that fetches blocks is more urgent than all that do not: it only asks for them, then computes the few tokens after them.
            priority=submit.priority - (0 if submit.fetch_from is None else len(PRIORITIES)),
            own_priority=submit.priority,
            length_limit=min(len(submit.prompt_token_ids) + submit.sampling.max_tokens, self.info.context_length),
            pooling=submit.pooling,
            constraint=submit.constraint,
            source=submit.fetch_from,
            hands_over=submit.hands_over,
            adapter=submit.adapter,
            images=images,
            second_from=submit.second_from,
            waited_s=submit.waited_s,
        )
        if submit.is_suspect:
            self._suspects.suspect(sequence)
        self._queue(sequence, self.sequences.get(submit.leader))

    def step(self, note_held: Callable[[HeldSequences], None] = lambda held: None) -> bool:
        """Compute the next tokens of as many sequences as the limits allow.

        Returns False if nothing was done because all sequences wait, for instance for blocks from another model or a tier. `note_held` receives the
        sequences that the step holds, before it is launched.
        """
        started = self._clock()
        self._chunks = None
        self._refresh_limits()
        has_encoded = self.requirements.encode_images(self.scheduler.limits.max_decode_delay_s)
        chunks = self._chunks = self._schedule()
        note_held(self.held)
        scheduled = self._clock()
        launched = self._launch(chunks) if chunks else None
        published: PublishedStep | None = None
        if self.in_flight and (launched is None or self.in_flight.is_full):
            published = self._collect_and_publish()
        if launched is not None:
            masks = self.requirements.token_masks.of(chunks)
            self.in_flight.choose(launched, masks)
            if self.runner.depth == 1 or self._suspects:
                published = self._collect_and_publish()
        self._chunks = []
        self._count(published, scheduled - started, self._clock() - started)
        return launched is not None or published is not None or has_encoded

    def on_idle(self) -> None:
        """Start work that no request waits for. Call it after a step's outputs have been sent."""
        self.tiers.begin_stores(everything=not self.has_work)

    def close(self) -> None:
        """Wait for running steps and close the tiers; afterwards nothing uses the device."""
        self.in_flight.wait()
        self.tiers.close()
        self.requirements.close()

    @property
    def held(self) -> HeldSequences:
        """Return the sequences that running steps compute, and those for which something is prepared."""
        computed = [chunk.sequence.sequence_id for chunk in self._chunks_under_way()]
        prepared = [sequence.sequence_id for sequence in self.scheduler.waiting.prepared]
        if not computed and not prepared:
            return NOTHING_HELD
        return HeldSequences(tuple(dict.fromkeys(computed)), tuple(prepared))

    def recover(self, message: str) -> None:
        """Continue after a failed step by computing its sequences again, in halves, until one fails alone.

        That sequence ends with an error; others continue in separate steps. `message`: why the step failed.
        """
        if self._chunks is None:  # planning the step failed: the scheduler's state is unknown
            self.fail_all("engine_error", message)
            return
        running = set(self.scheduler.running)
        ends: dict[Sequence, int] = {}
        for chunk in self._chunks_under_way():
            if chunk.sequence in running and chunk.is_current:
                ends[chunk.sequence] = chunk.end
        self.in_flight.drop()
        self._chunks = []
        limits = self.scheduler.limits
        for sequence in ends:
            sequence.rewind(limits.block_size if limits.has_states else 1)
        culprit = self._suspects.note_failure(ends)
        if culprit is not None:
            self.sequences.fail(
                culprit, "request_failed", f"{message}; it fails with this request alone: change the request"
            )

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End every sequence with an error and drop the cache, whose content is unreliable."""
        self.in_flight.drop()
        self._chunks = []
        self._suspects.clear()
        self.scheduler.waiting.cancel_all_awaited()
        self.requirements.release_all()
        self.tiers.reset()
        if self.scheduler.lease is None:
            self.runner.reset()
        self._begin_anew(self.scheduler.limits, self.scheduler.lease)
        for sequence in self.sequences:
            if sequence.hands_over:
                self.tiers.end_hand_over(sequence.sequence_id)
            if self.speculation is not None:
                self.speculation.forget(sequence)
        self.sequences.abandon(code, message)

    def load(self) -> ModelLoad:
        scheduler, stats, tiers, images = self.scheduler, self.stats, self.tiers.load(), self.requirements.images
        pool, lease, num_groups = scheduler.pool, scheduler.lease, len(scheduler.limits.windows)
        # Pool and lease count a block for each group of layers.
        free, total = (pool.num_available, pool.num_blocks) if lease is None else lease.capacity()
        block_tokens = scheduler.limits.block_size / num_groups
        return ModelLoad(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting_tokens,
            free_blocks=free // num_groups,
            total_blocks=total // num_groups,
            **stats.counts.by_name(),
            tier_losses=tiers.num_lost,
            corrupt_blocks=tiers.corrupt_blocks,
            pinned_blocks=tiers.num_pinned,
            store=tiers.store,
            store_tokens_per_s=tiers.store_blocks_per_s * block_tokens,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            prefill_tokens_per_s=stats.rates.prefill_tokens_per_s,
            decode_tokens_per_s=stats.rates.decode_tokens_per_s,
            handed_over_tokens_per_s=tiers.handed_over_blocks_per_s * block_tokens,
            drafts=NO_DRAFTS if self.speculation is None else self.speculation.counts,
            adapter_loads=self.requirements.adapters.num_loads,
            image_encodes=0 if images is None else images.num_encoded,
            image_hits=0 if images is None else images.num_found,
            num_graphs=self.runner.num_graphs,
            graph_failures=self.runner.graph_failures,
        )

    def _begin_anew(self, limits: SchedulerLimits, lease: Lease | None) -> None:
        """Start with a new scheduler, publisher and empty cache. Borrowed blocks are zeroed and returned."""
        drop = self.tiers.drop
        num_blocks = self.info.total_blocks * len(limits.windows)
        pool = (
            BlockPool(num_blocks, on_forget=drop, num_shares=limits.copies) if lease is None else lease.new_pool(drop)
        )
        self.scheduler = Scheduler(
            pool,
            limits,
            lease,
            self.tiers,
            self._clock,
            self.speculation,
            self.stats.counts,
            self.requirements.is_computable,
        )
        self._publisher = Publisher(
            self.sequences, self.scheduler, self.stats, self.runner, self.info.eos_token_ids, self.speculation
        )

    def _queue(self, sequence: Sequence, leader: Sequence | None = None) -> None:
        """Queue a sequence for its requirements and then for its turn.

        `leader`: an open sequence that may have the same prompt.
        """
        adapter = "" if sequence.adapter is None else sequence.adapter.digest
        sequence.chain_root = chain_root(sequence.tenant, self.identity, adapter)
        if leader is not None and not sequence.shares_prompt_with(leader):
            leader = None
        self.sequences.add(sequence)
        if sequence.hands_over:
            self.tiers.begin_hand_over(sequence.sequence_id)
        self.scheduler.add(sequence, leader, self.requirements.awaited(sequence))

    def _take_back(self, sequence: Sequence) -> None:
        """Release what an ended sequence holds."""
        self._suspects.discard(sequence)
        self.scheduler.remove(sequence)
        self.requirements.release(sequence)

    def _refresh_limits(self) -> None:
        """Shorten the longest context if other models have reserved part of the arena since the last step."""
        lease, limits = self.scheduler.lease, self.scheduler.limits
        if lease is None or lease.max_blocks // len(limits.windows) == self.info.total_blocks:
            return
        context_length = limits.groups.longest_context(lease.max_blocks // limits.copies, self._longest_context)
        total_blocks = lease.max_blocks // len(limits.windows)
        before, self.info = self.info, replace(self.info, context_length=context_length, total_blocks=total_blocks)
        if context_length >= before.context_length:
            return
        for sequence in self.sequences:
            sequence.length_limit = min(sequence.length_limit, context_length)
            # a pooled text needs no room for a next token
            if len(sequence.token_ids) < context_length + (sequence.pooling is not None):
                continue
            message = (
                f"the sequence has {len(sequence.token_ids)} tokens; {self.info.name} holds {context_length} "
                "since another model reserved KV cache: raise kv_gib, or lower the other's kv_tokens"
            )
            self.sequences.fail(sequence, "context_length_exceeded", message)

    def _schedule(self) -> list[Chunk]:
        """Return the chunks of the next step."""
        most_beside_decodes = self.stats.rates.num_prompt_tokens_in(self.scheduler.limits.max_decode_delay_s)
        is_measured = self.stats.rates.prefill_tokens_per_s > 0
        if not self._suspects:
            planned = self.scheduler.schedule(most_beside_decodes, is_measured=is_measured)
            return self.requirements.without_stale(planned, self.scheduler)
        if self.in_flight:  # a step of suspects overlaps with no other
            return []
        for turn in self._suspects.turns():
            planned = self.scheduler.schedule(most_beside_decodes, turn, is_measured=is_measured)
            if chunks := self.requirements.without_stale(planned, self.scheduler):
                return chunks
        return []

    def _chunks_under_way(self) -> list[Chunk]:
        return [*self.in_flight.chunks, *(self._chunks or ())]

    def _launch(self, chunks: list[Chunk]) -> ForwardedStep:
        """Start the forward pass of a step."""
        started_texts: frozenset[int] = frozenset()
        if self.info.pooling is not None:
            started_texts = frozenset(s.arrival.number for s in self.scheduler.running if s.num_computed_tokens)
        launched = self.in_flight.forward(chunks, started_texts)
        is_fed = self.in_flight.feeds_next
        for chunk in chunks:
            self.scheduler.launch(chunk, is_fed)
        return launched

    def _collect_and_publish(self) -> PublishedStep:
        """Wait for the oldest step in progress, and publish its results."""
        step = self.in_flight.collect()
        began, num_before = self._clock(), self.stats.output_tokens
        self._publisher.publish(step)
        self._suspects.note_success()
        return PublishedStep(step, self.stats.output_tokens - num_before, self._clock() - began)

    def _count(self, published: PublishedStep | None, schedule_s: float, step_s: float) -> None:
        """Count a step in the statistics of the model's speed."""
        self.stats.count_step(published, schedule_s, step_s)
        if published is None:
            return
        if self.speculation is not None:
            step = published.step
            counts = StepCount(step.num_tokens, step.num_drafts, step.num_decodes, published.num_tokens, step_s)
            self.speculation.count_step(counts)
        self.tiers.note_prefill_rate(self.stats.rates.prefill_tokens_per_s)
