"""Runs a model over its KV cache: chunks in, tokens out.

Knows tensors; refuses to know who waits for the tokens. The cache of a model is block-major, [num_blocks, num_layers,
2, block_size, kv_heads, head_dim]: all layers of a block lie together, so that one copy moves it, and each layer sees a
strided view.
"""

import math
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import accumulate

import torch

from engine.batch import build_batch
from engine.errors import StepError
from engine.layers.attention import LayerCache
from engine.models.registry import Model
from engine.pooling import pool
from engine.protocol import Pooling, TokenLogprobs
from engine.results import ChunkResult, RunResult, SampledToken
from engine.sampling import choose_tokens, prompt_logprobs
from engine.scheduler import Chunk
from engine.sequence import Sequence

_PROMPT_LOGPROB_ROWS = 128  # logits held at once: 64 MiB at a vocabulary of 128k


class ModelRunner:
    def __init__(
        self, model: Model, kv_cache: torch.Tensor, pooling: Pooling | None = None, is_normalized: bool = False
    ) -> None:
        """`pooling`: of an embedding model; `is_normalized`: its embeddings have length 1."""
        self.model = model
        self.pooling = pooling
        self.is_normalized = is_normalized
        self.kv_cache = kv_cache
        self.num_blocks = kv_cache.shape[0]
        self.block_size = kv_cache.shape[3]
        self._layers = [LayerCache(kv_cache[:, i, 0], kv_cache[:, i, 1]) for i in range(kv_cache.shape[1])]

    @torch.inference_mode()
    def run(self, chunks: SequenceOf[Chunk]) -> RunResult:
        batch = build_batch(chunks, self.block_size, self.kv_cache.device)
        launched = time.perf_counter()
        hidden = self.model.forward(batch, self._layers)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        tokens: Iterator[SampledToken] = iter(())
        if sampling:
            rows = hidden if batch.sampling_rows is None else hidden.index_select(0, batch.sampling_rows)
            tokens = iter(choose_tokens(self.model.logits(rows), sampling))
        ends = accumulate(chunk.length for chunk in chunks)
        results = [
            ChunkResult(
                next(tokens) if chunk.samples else None,
                self._prompt_logprobs(chunk, hidden[end - chunk.length : end]),
                pool(chunk, hidden[end - chunk.length : end], self.is_normalized),
            )
            for chunk, end in zip(chunks, ends, strict=True)
        ]
        return RunResult(results, time.perf_counter() - launched)

    @torch.inference_mode()
    def scrub(self, blocks: SequenceOf[int]) -> None:
        """Replace content that may not be numbers by zeros."""
        self.kv_cache[list(blocks)] = 0

    @torch.inference_mode()
    def reset(self) -> None:
        self.kv_cache.zero_()

    def warm_up(self, prompt: SequenceOf[int]) -> None:
        """A short prompt and one more token, in blocks that nobody holds yet: the first request should not pay for lazy
        initialisation, and a model that yields no numbers should not seem ready."""
        sequence = Sequence.throwaway(list(prompt), blocks=range(-(-(len(prompt) + 1) // self.block_size)))
        if self.pooling is not None:
            sequence.pooling = self.pooling
            embedding = self.run([Chunk(sequence, 0, len(prompt))]).chunks[0].embedding
            if embedding is None or not all(map(math.isfinite, embedding)):
                raise StepError(
                    "its hidden states are not finite; the weights do not fit config.json or the chosen dtype"
                )
            return
        for length in (len(prompt), 1):
            token = self.run([Chunk(sequence, sequence.num_computed_tokens, length)]).chunks[0].token
            if token is None or not token.is_finite:
                raise StepError("its logits are not finite; the weights do not fit config.json or the chosen dtype")
            sequence.num_computed_tokens += length
            sequence.token_ids.append(token.token_id)

    def _prompt_logprobs(self, chunk: Chunk, hidden: torch.Tensor) -> tuple[TokenLogprobs, ...]:
        """hidden [chunk.length, hidden]: row i predicts token start + i + 1, as long as that is of the prompt."""
        sequence = chunk.sequence
        if not sequence.wants_prompt_logprobs:
            return ()
        sampling = sequence.sampling
        num_top = sampling.num_logprobs if sampling.num_prompt_logprobs is None else sampling.num_prompt_logprobs
        targets = sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt_tokens)]
        reported: list[TokenLogprobs] = []
        for i in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            part = targets[i : i + _PROMPT_LOGPROB_ROWS]
            logits = self.model.logits(hidden[i : i + len(part)])
            reported += prompt_logprobs(logits, part, num_top or 0)
        return tuple(reported)
