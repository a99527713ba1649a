"""One model's engine: sequences in, one step at a time, tokens out.

Knows sequences, their ends and their failures; refuses to know sockets, processes and (through its runner) tensors.
Every sequence that was accepted ends with exactly one output that carries a finish reason, whatever happens to the step
it was in.
"""

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple, Protocol

from engine.kv.block_pool import BlockPool
from engine.kv.prefix_index import chain_root
from engine.protocol import ErrorCode, FinishReason, ModelInfo, ModelLoad, Submit, TokenLogprobs, TokenOutput
from engine.rates import Rates
from engine.results import ChunkResult, RunResult, SampledToken
from engine.scheduler import Chunk, Limits, Scheduler
from engine.sequence import Sequence
from engine.validation import refusal


class Runner(Protocol):
    """What computes: a ModelRunner, or a fake in tests."""

    def run(self, chunks: SequenceOf[Chunk]) -> RunResult: ...

    def scrub(self, blocks: SequenceOf[int]) -> None:
        """Zero these blocks."""

    def reset(self) -> None:
        """Zero all of them."""


class StepTimes(NamedTuple):
    schedule_s: float = 0.0
    prepare_s: float = 0.0
    device_s: float = 0.0
    publish_s: float = 0.0


class Engine:
    def __init__(
        self, info: ModelInfo, runner: Runner, limits: Limits, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.info = info
        self.scheduler = Scheduler(BlockPool(info.total_blocks), limits)
        self._runner = runner
        self._limits = limits
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._outputs: list[TokenOutput] = []
        self._rates = Rates()
        self._prefix_queries = self._prefix_hits = 0  # of schedulers that a failed step has ended
        self._prompt_tokens = self._output_tokens = 0
        self.last_step = StepTimes()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def submit(self, submit: Submit) -> None:
        """Accept the sequence, or answer it with an error."""
        refused = refusal(submit, self.info)
        if submit.sequence_id in self._sequences:
            refused = "invalid_request", f"sequence id {submit.sequence_id!r} is already in use"
        elif self.scheduler.is_full:
            refused = (
                "overloaded",
                f"{self._limits.max_waiting} sequences wait for {self.info.name} already; try again later",
            )
        if refused:
            self._outputs.append(error_output(submit.sequence_id, *refused))
            return
        root = chain_root(submit.salt, self.info.name, self.info.dtype)
        sequence = Sequence(
            submit.sequence_id,
            list(submit.prompt_token_ids),
            submit.sampling,
            root,
            num_delivered_tokens=submit.num_delivered_tokens,
            tenant=submit.salt,
            priority=submit.priority,
            pooling=submit.pooling,
        )
        self._sequences[submit.sequence_id] = sequence
        leader = self._sequences.get(submit.leader) if submit.leader is not None else None
        if leader is not None and not sequence.shares_prompt_with(leader):
            leader = None
        self.scheduler.add(sequence, leader)

    def abort(self, sequence_id: str) -> None:
        """End the sequence now; of one that has ended already there is nothing to do."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end(sequence)
            self._outputs.append(TokenOutput(sequence_id, finish_reason="abort"))

    def abort_all(self) -> None:
        for sequence_id in list(self._sequences):
            self.abort(sequence_id)

    def step(self) -> None:
        """Compute the next tokens of as many sequences as the limits allow."""
        started = self._clock()
        chunks = self.scheduler.schedule()
        scheduled = self._clock()
        result = self._runner.run(chunks)
        computed_at = self._clock()
        for chunk, computed in zip(chunks, result.chunks, strict=True):
            self._publish(chunk, computed)
        ended = self._clock()
        self._rates.count(chunks, ended - started)
        prepare_s = computed_at - scheduled - result.device_s
        self.last_step = StepTimes(scheduled - started, prepare_s, result.device_s, ended - computed_at)

    def take_outputs(self) -> list[TokenOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    def end_all(self, code: ErrorCode, message: str) -> None:
        """End every sequence with an error; nothing is wrong with the engine."""
        for sequence in list(self._sequences.values()):
            self._end(sequence)
            self._outputs.append(error_output(sequence.sequence_id, code, message))

    def fail_all(self, code: ErrorCode, message: str) -> None:
        """End every sequence with an error and forget the cache, whose content is in doubt."""
        self._prefix_queries += self.scheduler.prefix_queries
        self._prefix_hits += self.scheduler.prefix_hits
        self._runner.reset()
        self.scheduler = Scheduler(BlockPool(self.info.total_blocks), self._limits)
        self._outputs.extend(error_output(sequence_id, code, message) for sequence_id in self._sequences)
        self._sequences.clear()

    def load(self) -> ModelLoad:
        scheduler = self.scheduler
        return ModelLoad(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.waiting_tokens,
            free_blocks=scheduler.pool.num_available,
            total_blocks=scheduler.pool.num_blocks,
            prefix_queries=self._prefix_queries + scheduler.prefix_queries,
            prefix_hits=self._prefix_hits + scheduler.prefix_hits,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_tokens_per_s=self._rates.decode_tokens_per_s,
        )

    def _publish(self, chunk: Chunk, computed: ChunkResult) -> None:
        sequence, token = chunk.sequence, computed.token
        if token is not None and not token.is_finite:
            self._fail(sequence, "the model's logits were not finite; its weights or its cache are damaged")
            return
        if computed.embedding is not None and not all(map(math.isfinite, computed.embedding)):
            self._fail(sequence, "the model's hidden states were not finite; its weights or its cache are damaged")
            return
        self.scheduler.advance(chunk)
        self._prompt_tokens += max(0, min(chunk.end, sequence.num_prompt_tokens) - chunk.start)
        sequence.prompt_logprobs.extend(computed.prompt_logprobs)
        if token is not None:
            self._append(sequence, token)
        elif computed.embedding is not None:
            self._outputs.append(TokenOutput(sequence.sequence_id, finish_reason="stop", embedding=computed.embedding))
            self._end(sequence)

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        first = not sequence.started
        prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        if sequence.wants_prompt_logprobs:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
            sequence.prompt_logprobs = []
        sequence.token_ids.append(token.token_id)
        sequence.started = True
        self._output_tokens += 1
        reason = self._finish_reason(sequence, token.token_id)
        self._outputs.append(
            TokenOutput(
                sequence.sequence_id,
                (token.token_id,),
                finish_reason=reason,
                num_cached_tokens=sequence.num_cached_tokens if first else None,
                logprobs=None if token.logprobs is None else (token.logprobs,),
                prompt_logprobs=prompt_logprobs,
            )
        )
        if reason:
            self._end(sequence)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """A token that stops is delivered like any other: the front end hides it, and every sampled token is accounted
        for."""
        sampling = sequence.sampling
        if token_id in sampling.stop_token_ids:
            return "stop"
        if token_id in self.info.eos_token_ids and not sampling.ignore_eos:
            return "stop"
        if sequence.num_output_tokens >= sampling.max_tokens or len(sequence.token_ids) >= self.info.context_length:
            return "length"
        return None

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.sequence_id]

    def _fail(self, sequence: Sequence, message: str) -> None:
        """End one sequence whose numbers are bad, and let none of them reach another: neither through the prefix cache
        nor through a reused block."""
        pool, blocks = self.scheduler.pool, sequence.block_table
        pool.forget(blocks)
        self._runner.scrub([block for block in blocks if pool.num_holders(block) == 1])
        self._end(sequence)
        self._outputs.append(error_output(sequence.sequence_id, "engine_error", message))


def error_output(sequence_id: str, code: ErrorCode, message: str) -> TokenOutput:
    return TokenOutput(sequence_id, finish_reason="error", error_code=code, error_message=message)
