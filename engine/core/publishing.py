"""Publication of a collected step's results: tokens up to the first wrong draft, embeddings.

A sequence whose logits are not finite fails alone. engine.py decides when steps are collected.
"""

import logging
import math
from collections.abc import Sequence as SequenceOf

from pilotlight.engine.api.errors import RankLostError
from pilotlight.engine.api.protocol import FinishReason, TokenLogprobs, TokenOutput
from pilotlight.engine.core.in_flight import CollectedStep
from pilotlight.engine.core.open_sequences import OpenSequences
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.core.stats import EngineStats
from pilotlight.engine.core.step import SampledToken
from pilotlight.engine.core.step_runner import Runner
from pilotlight.engine.grammar.matcher import ConstraintError
from pilotlight.engine.scheduling.plan import Chunk, Speculation
from pilotlight.engine.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)


class Publisher:
    def __init__(
        self,
        sequences: OpenSequences,
        scheduler: Scheduler,
        stats: EngineStats,
        runner: Runner,
        eos_token_ids: SequenceOf[int],
        speculation: Speculation | None = None,
    ) -> None:
        self._sequences = sequences
        self._scheduler = scheduler
        self._stats = stats
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._speculation = speculation

    def publish(self, step: CollectedStep) -> None:
        """Publish a step's results. Its sequences share the device's time in proportion to their tokens."""
        result = step.result
        us_per_token = step.busy_s * 1e6 / step.num_tokens
        for i, (chunk, tokens) in enumerate(zip(step.chunks, step.tokens, strict=True)):
            chunk.sequence.device_us += us_per_token * chunk.num_tokens
            if chunk.is_current:
                if i in result.prompt_logprobs:
                    chunk.sequence.prompt_logprobs.extend(result.prompt_logprobs[i])
                self._publish_or_fail(chunk, tokens, result.embeddings.get(i))

    def _publish_or_fail(
        self, chunk: Chunk, chosen: SequenceOf[SampledToken], embedding: tuple[float, ...] | None
    ) -> None:
        """Publish one sequence's results; an error ends this sequence alone."""
        try:
            self._publish(chunk, chosen, embedding)
        except RankLostError:
            raise
        except Exception as error:
            log.exception("the results of sequence %s cannot be published", chunk.sequence.sequence_id)
            message = f"the answer's next token cannot be published: {type(error).__name__}: {error}"
            self._sequences.fail(chunk.sequence, "request_failed", message)

    def _publish(self, chunk: Chunk, chosen: SequenceOf[SampledToken], embedding: tuple[float, ...] | None) -> None:
        sequence = chunk.sequence
        # refused drafts are checked as well: their keys and values are in the sequence's blocks
        for token in chosen:
            if not token.is_finite:
                self._fail(sequence, "the model's logits were not finite; its weights or its cache are damaged")
                return
        if embedding is not None and not all(map(math.isfinite, embedding)):
            self._fail(sequence, "the model's hidden states were not finite; its weights or its cache are damaged")
            return
        if chunk.start < sequence.num_prompt_tokens:
            self._stats.prompt_tokens += min(chunk.end, sequence.num_prompt_tokens) - chunk.start
        if chosen:
            self._append(chunk, chosen)
            return
        self._scheduler.complete(chunk)
        if embedding is not None:
            self._sequences.tell(
                TokenOutput(
                    sequence.sequence_id, finish_reason="stop", embedding=embedding, device_us=sequence.take_device_us()
                )
            )

    def _append(self, chunk: Chunk, chosen: SequenceOf[SampledToken]) -> None:
        """Publish accepted drafts and the token after them, up to a token that ends the sequence."""
        sequence, first = chunk.sequence, not chunk.sequence.started
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        if first and sequence.wants_prompt_logprobs:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
            sequence.prompt_logprobs = []
        try:
            accepted, reason = self._accept(chunk, chosen)
        except ConstraintError as error:
            self._sequences.leave_grammar(sequence, error)
            return
        token_ids = tuple([token.token_id for token in accepted])
        sequence.token_ids[chunk.end : chunk.end + 1] = token_ids
        self._scheduler.complete(chunk, num_accepted=len(accepted) - 1)
        sequence.started = True
        self._stats.output_tokens += len(accepted)
        num_right = 0
        if chunk.drafts:
            num_right = sum([draft == token_id for draft, token_id in zip(chunk.drafts, token_ids, strict=False)])
            if self._speculation is not None:
                self._speculation.note(chunk, num_right)
        logprobs = [token.logprobs for token in accepted if token.logprobs is not None]
        self._sequences.tell(
            TokenOutput(
                sequence.sequence_id,
                token_ids,
                finish_reason=reason,
                num_cached_tokens=sequence.num_cached_tokens if first else None,
                num_fetched_tokens=sequence.num_fetched_tokens if first else 0,
                queue_us=sequence.queue_us if first else 0,
                logprobs=tuple(logprobs) or None,
                prompt_logprobs=prompt_logprobs,
                num_drafted=len(chunk.drafts),
                num_accepted=num_right,
                device_us=sequence.take_device_us(),
            )
        )

    def _accept(
        self, chunk: Chunk, chosen: SequenceOf[SampledToken]
    ) -> tuple[SequenceOf[SampledToken], FinishReason | None]:
        sequence, drafts = chunk.sequence, chunk.drafts
        for i, token in enumerate(chosen):
            reason = self._finish_reason(sequence, chunk.end + i, token.token_id)
            matcher = sequence.matcher
            if matcher is not None and reason != "stop":
                matcher.accept(token.token_id)
                reason = "stop" if matcher.is_complete else reason  # complete: the grammar allows no further token
            if reason or i == len(drafts) or token.token_id != drafts[i]:
                break
        return chosen if i + 1 == len(chosen) else chosen[: i + 1], reason

    def _finish_reason(self, sequence: Sequence, position: int, token_id: int) -> FinishReason | None:
        """Return why the token ends its sequence, or None.

        A stop token is delivered like any other: the front end hides it, and every sampled token is counted.
        """
        sampling = sequence.sampling
        if token_id in sampling.stop_token_ids:
            return "stop"
        if token_id in self._eos_token_ids and not sampling.ignore_eos:
            return "stop"
        return "length" if position + 1 >= sequence.length_limit else None

    def _fail(self, sequence: Sequence, message: str) -> None:
        """End one sequence that computed NaN or infinity, and zero its blocks.

        These values must not spread through the prefix cache or a reused block.
        """
        self._runner.scrub(self._scheduler.discard(sequence))
        self._sequences.fail(sequence, "engine_error", message)
