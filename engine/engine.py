"""One model's engine: sequences in, one step at a time, tokens out.

A step is two launches: the forward pass, and the choice of tokens. Where the runner computes beside the host (a GPU), steps
overlap: the forward pass of the next one is queued behind the choice of the one before, whose tokens are then read and
published, and what the next choice makes of them (penalties) is prepared while the device has the forward pass to do. A
sequence that turns out to have ended has been computed once too often: nothing is chosen for it.

Knows sequences, their ends and their failures; refuses to know sockets, processes and (through its runner) tensors.
What becomes of a step's results is publishing.py's business.
"""

import logging
import time
import weakref
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from engine.adapters.residency import AdapterResidency, AdapterStore
from engine.awaited import AwaitedTogether
from engine.constraints import Grammars
from engine.images.prompt import SequenceImage, tenants_name
from engine.images.residency import ImageEncoder, ImageResidency
from engine.in_flight import CollectedStep, ForwardedStep, InFlightSteps, Runner
from engine.kv.block_pool import BlockPool
from engine.kv.generations import GenerationCheck
from engine.kv.lease import Capacity, Lease
from engine.kv.prefix_index import CacheIdentity, chain_root
from engine.kv.tiers import Tiers
from engine.open_sequences import OpenSequences, error_output
from engine.plan import Chunk, SchedulerLimits, Speculation, StepCount
from engine.protocol import NO_DRAFTS, AdapterSource, ErrorCode, ModelInfo, ModelLoad, Submit, TokenOutput
from engine.publishing import Publisher
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import EngineStats
from engine.struct import replace
from engine.token_masks import TokenMasks
from engine.validation import refusal

log = logging.getLogger(__name__)

# Of images, between two steps: where nothing runs on beside the host time ends it, on a GPU the number, which its launches do not wait for.
_MOST_ENCODING_S = 0.2
_MOST_PIECES = 4


class StepTimes(NamedTuple):
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    device_s: float = 0.0
    publish_s: float = 0.0


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
        with_torch: bool = True,
        speculation: Speculation | None = None,
        grammars: Grammars | None = None,
        adapters: AdapterStore | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        """`lease`: the model borrows blocks from an arena; None: it has `info.total_blocks` of its own. `identity`: needed
        where `tiers` outlive the engine. `with_torch`: it may be imported. `speculation`: guesses tokens that a step then checks.
        `adapters`: their slots, and `images`: their encoder; None where the model computes none."""
        self.info = info
        self.runner = runner
        self.tiers = tiers or Tiers()
        self._identity = identity or CacheIdentity(info.name, info.dtype, info.block_size)
        self._limits = limits
        self._lease = lease
        self._with_torch = with_torch
        self._speculation = speculation
        this: Engine = weakref.proxy(self)  # no circle: what a bootstrap program has mapped goes with its engine
        self._adapters = AdapterResidency(info.name, adapters)
        self._images = None if images is None else ImageResidency(images)
        self._sequences = OpenSequences(lambda sequence: this._take_back(sequence))
        self._token_masks = TokenMasks(info, grammars, self._sequences)
        self._stats = EngineStats()
        self._longest_context = info.context_length  # when nothing of the arena is reserved that was not at the start
        self._max_blocks = 0  # of the lease, by which the longest context was last told
        self._clock = clock
        self.scheduler = self._new_scheduler()
        self._steps = InFlightSteps(runner, limits.block_size)
        self.last_step = StepTimes()
        self._device_free_at = 0.0  # by the clock: when the newest step was collected

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._steps)

    @property
    def has_outputs(self) -> bool:
        return self._sequences.has_outputs

    def has(self, sequence_id: str) -> bool:
        return sequence_id in self._sequences

    def submit(self, submit: Submit) -> None:
        """Accept the sequence, or answer it with an error."""
        assert not self.has(submit.sequence_id), "an answer would end the one that is open"
        self._refresh_limits()
        refused = refusal(submit, self.info)
        if self.scheduler.is_full:
            refused = (
                "overloaded",
                f"{self._limits.max_waiting} sequences wait for {self.info.name} already; try again later",
            )
        if refused:
            self._sequences.tell(error_output(submit.sequence_id, *refused))
            return
        images = self._images_of(submit)
        if images is None:
            message = "an image was named without its data, and is not here; send it once more with data"
            self._sequences.tell(error_output(submit.sequence_id, "images_missing", message))
            return
        root = self._chain_root(submit.salt, submit.adapter)
        sequence = Sequence(
            submit.sequence_id,
            list(submit.prompt_token_ids),
            submit.sampling,
            root,
            num_delivered_tokens=submit.num_delivered_tokens,
            tenant=submit.salt,
            priority=submit.priority,
            length_limit=min(len(submit.prompt_token_ids) + submit.sampling.max_tokens, self.info.context_length),
            pooling=submit.pooling,
            constraint=submit.constraint,
            source=submit.fetch_from,
            hands_over=submit.hands_over,
            adapter=submit.adapter,
            images=images,
        )
        self._sequences.add(sequence)
        leader = self._sequences.get(submit.leader)
        if leader is not None and not sequence.shares_prompt_with(leader):
            leader = None
        self._queue(sequence, leader)

    def abort(self, sequence_id: str) -> None:
        """End the sequence now; of one that has ended already there is nothing to do."""
        if sequence_id in self._sequences:
            self._sequences.tell(TokenOutput(sequence_id, finish_reason="abort"))

    def abort_all(self) -> None:
        for sequence in self._sequences:
            self.abort(sequence.sequence_id)

    def step(self) -> bool:
        """Compute the next tokens of as many sequences as the limits allow. False if all there are wait for blocks: from
        another model, or from a tier."""
        started = self._clock()
        self._refresh_limits()
        has_encoded = self._encode_images()
        most_beside_decodes = self._stats.rates.num_prompt_tokens_in(self._limits.max_decode_delay_s)
        chunks = self._token_masks.enforceable(self._drop_stale(self.scheduler.schedule(most_beside_decodes)))
        chunks = self._adapters.computable(chunks, self._sequences)
        if self._images is not None:
            chunks = self._images.computable(chunks, self.scheduler.defer)
        schedule_s = self._clock() - started
        forwarded = self._forward(chunks) if chunks else None
        collected: CollectedStep | None = None
        publish_s = 0.0
        num_published = self._stats.output_tokens
        if self._steps and (forwarded is None or self._steps.is_full):
            collected, publish_s = self._land()
        if forwarded is not None:
            self._steps.choose(forwarded, self._token_masks.of(chunks))
            if self.runner.depth == 1:
                collected, publish_s = self._land()
        step_s = self._clock() - started
        device_s = collected.result.device_s if collected is not None else 0.0
        self.last_step = StepTimes(schedule_s, step_s - schedule_s - device_s - publish_s, device_s, publish_s)
        if collected is not None:
            num_published = self._stats.output_tokens - num_published
            self._stats.rates.count(collected.num_prompt_tokens, collected.num_decodes, num_published, step_s)
            if self._speculation is not None:
                rows, drafts, decodes = collected.num_tokens, collected.num_drafts, collected.num_decodes
                self._speculation.count_step(StepCount(rows, drafts, decodes, num_published, step_s))
            self.tiers.note_prefill_rate(self._stats.rates.prefill_tokens_per_s)
        return forwarded is not None or collected is not None or has_encoded

    def on_idle(self) -> None:
        """Begin work that no request waits for. Call it when a step's outputs have been sent."""
        self.tiers.begin_stores(everything=not self.has_work)

    def close(self) -> None:
        """Wait for the steps under way and end the tiers: afterwards nothing touches the device."""
        self._steps.wait()
        self.tiers.close()
        self._token_masks.close()
        self._adapters.close()
        if self._images is not None:
            self._images.close()

    def take_outputs(self) -> list[TokenOutput]:
        return self._sequences.take_outputs()

    def detach_sequences(self) -> list[Sequence]:
        """Remove and return all sequences, oldest first, for another engine of the same model to adopt and compute
        again."""
        going = list(self._sequences)
        for sequence in going:
            self._sequences.remove(sequence)
            sequence.forget_computed()
            sequence.block_hashes = []
        return sorted(going, key=lambda sequence: sequence.arrival)

    def adopt_sequences(self, sequences: SequenceOf[Sequence]) -> None:
        """Continue sequences that another engine of the same model has detached."""
        for sequence in sequences:
            sequence.chain_root = self._chain_root(sequence.tenant, sequence.adapter)
            sequence.length_limit = min(sequence.length_limit, self.info.context_length)
            self._sequences.add(sequence)
            self._queue(sequence)

    def hand_over_to(self, successor: "Engine") -> list[TokenOutput]:
        """Let another engine of the same model go on with every open sequence. Return the outputs that are still to be sent."""
        successor.adopt_sequences(self.detach_sequences())
        return self.take_outputs()

    def end_all(self, code: ErrorCode, message: str) -> None:
        """End every sequence with an error; nothing is wrong with the engine."""
        for sequence in self._sequences:
            self._sequences.fail(sequence, code, message)

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End every sequence with an error and forget the cache, whose content is in doubt."""
        self._steps.drop()
        self._stats.end(self.scheduler)
        self.scheduler.cancel_awaited()
        self._adapters.release_all()
        if self._images is not None:
            self._images.release_all()
        self.tiers.reset()
        if self._lease is None:
            self.runner.reset()
        self.scheduler = self._new_scheduler()
        for sequence in self._sequences:
            if sequence.hands_over:
                self.tiers.end_hand_over(sequence.sequence_id)
            if self._speculation is not None:
                self._speculation.forget(sequence)
        self._sequences.abandon(code, message)

    def load(self) -> ModelLoad:
        pool = self.scheduler.pool
        # Blocks of one group each.
        free, total = (pool.num_available, pool.num_blocks) if self._lease is None else self._lease.capacity()
        num_groups = len(self._limits.windows)
        block_tokens = self._limits.block_size / num_groups
        capacity = Capacity(free // num_groups, total // num_groups)
        drafts = NO_DRAFTS if self._speculation is None else self._speculation.counts
        images = (0, 0) if self._images is None else (self._images.num_encoded, self._images.num_found)
        tiers = self.tiers.load()
        return self._stats.load(self.scheduler, capacity, tiers, block_tokens, drafts, self._adapters.num_loads, images)

    def _new_scheduler(self) -> Scheduler:
        """Return a scheduler with nothing cached. What was borrowed goes back, emptied."""
        drop, lease = self.tiers.drop, self._lease
        num_blocks = self.info.total_blocks * len(self._limits.windows)
        copies = self._limits.copies
        pool = BlockPool(num_blocks, on_forget=drop, num_shares=copies) if lease is None else lease.new_pool(drop)
        self._generations = GenerationCheck(pool.generations, with_torch=self._with_torch)
        scheduler = Scheduler(pool, self._limits, self._lease, self.tiers, self._clock, self._speculation)
        self._publisher = Publisher(
            self._sequences, scheduler, self._stats, self.runner, self.info.eos_token_ids, self._speculation
        )
        return scheduler

    def _drop_stale(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks whose blocks are all still their sequence's, and end the other sequences before they read or write one."""
        stale = self._generations.stale([chunk.sequence for chunk in chunks])
        for i in stale:
            sequence = chunks[i].sequence
            log.error("%s: a block of sequence %s was handed to another one", self.info.name, sequence.sequence_id)
            message = "a block of the sequence's KV cache was handed to another one; send the request again"
            self._sequences.fail(sequence, "engine_error", message)
        return [chunk for i, chunk in enumerate(chunks) if i not in stale] if stale else chunks

    def _refresh_limits(self) -> None:
        """Shorten the longest context where other models have reserved part of the arena since the last step."""
        if self._lease is None or self._lease.max_blocks == self._max_blocks:
            return
        self._max_blocks = max_blocks = self._lease.max_blocks
        of_rank = max_blocks // self._limits.copies
        context_length = self._limits.groups.longest_context(of_rank, self._longest_context)
        if context_length == self.info.context_length:
            return
        self.info = replace(
            self.info, context_length=context_length, total_blocks=max_blocks // len(self._limits.windows)
        )
        for sequence in self._sequences:
            sequence.length_limit = min(sequence.length_limit, context_length)
            if len(sequence.token_ids) < context_length + (sequence.pooling is not None):  # no token follows a text
                continue
            message = (
                f"the sequence has {len(sequence.token_ids)} tokens; {self.info.name} holds {context_length} "
                "since another model reserved KV cache: raise kv_gib, or lower the other's kv_tokens"
            )
            self._sequences.fail(sequence, "context_length_exceeded", message)

    def _chain_root(self, salt: bytes, adapter: AdapterSource | None) -> bytes:
        return chain_root(salt, self._identity, adapter.digest if adapter is not None else "")

    def _take_back(self, sequence: Sequence) -> None:
        """Take back what an ended sequence has."""
        self.scheduler.remove(sequence)
        self._adapters.release(sequence)
        if self._images is not None:
            self._images.release(sequence)

    def _queue(self, sequence: Sequence, leader: Sequence | None = None) -> None:
        """Let a sequence wait for its turn, and before that for its grammar and its adapter."""
        if sequence.hands_over:
            self.tiers.begin_hand_over(sequence.sequence_id)
        grammar = self._token_masks.awaited(sequence, self._clock)
        adapter = self._adapters.awaited(sequence, self._clock)
        self.scheduler.add(sequence, leader, AwaitedTogether.of(grammar, adapter))

    def _images_of(self, submit: Submit) -> tuple[SequenceImage, ...] | None:
        """Return a sequence's images; None: one was not sent, and is not here."""
        found: list[SequenceImage] = []
        for image in submit.images:
            assert self._images is not None, "a model without an encoder refuses images"
            name = tenants_name(submit.salt, image.digest)
            data = self._images.files.found(name, image.data)
            if data is None:
                return None
            found.append(SequenceImage.of(image, name, data, submit.prompt_token_ids, self._images.placeholder))
        return tuple(found)

    def _encode_images(self) -> bool:
        """Encode images that sequences wait for, for as long as those that decode may be held up; end the sequences whose images cannot be had."""
        if self._images is None:
            return False
        until = self._clock() + min(self._limits.max_decode_delay_s, _MOST_ENCODING_S)
        has_encoded, failures = self._images.encode(_MOST_PIECES, self._clock, until)
        for sequence, code, message in failures:
            self._sequences.fail(sequence, code, message)
        return has_encoded

    def _forward(self, chunks: list[Chunk]) -> ForwardedStep:
        begun_texts: frozenset[int] = frozenset()
        if self.info.pooling is not None:
            begun_texts = frozenset(s.arrival for s in self.scheduler.running if s.num_computed_tokens)
        forwarded = self._steps.forward(chunks, begun_texts)
        is_fed = self._steps.feeds_next
        for chunk in chunks:
            self.scheduler.launch(chunk, is_fed)
        return forwarded

    def _land(self) -> tuple[CollectedStep, float]:
        """Collect the oldest step under way, and publish its results. Return it, and how many seconds the latter took."""
        step = self._steps.collect()
        collected = self._clock()
        # Of a step that overlaps with others, what lies behind the one before: all of them are never longer than the clock.
        busy_s = min(step.result.device_s, collected - self._device_free_at)
        self._device_free_at = collected
        self._publisher.publish(step, busy_s)
        return step, self._clock() - collected
