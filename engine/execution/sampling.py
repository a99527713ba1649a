"""The step from logits to tokens: gathers the rows' sampling parameters and calls the kernels.

Greedy rows need no random number and cost nothing extra; the random number of a sampled row depends only on (seed, position), so neither batch nor
history matters. Rows without penalties or biases cost nothing extra either: the logits of other rows are changed entry by entry, and restored after
the choice, because logprobs are reported as the model computed them. A row that follows a grammar chooses among the tokens of its mask.
"""

import math
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import torch

from pilotlight.engine.api.protocol import SamplingParams, TokenLogprobs
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.step import ChoiceRow, SampledToken
from pilotlight.engine.core.token_counts import CountEntries
from pilotlight.engine.device.transfer import to_device, to_host
from pilotlight.kernels.sampling.logprobs import token_logprobs, token_ranks
from pilotlight.kernels.sampling.masks import mask_
from pilotlight.kernels.sampling.penalties import LogitEntries, penalize_, restore_
from pilotlight.kernels.sampling.sample import argmax, sample
from pilotlight.kernels.sampling.sampling_batch import SamplingBatch, SamplingRow

_MASK64 = (1 << 64) - 1
_PROMPT_LOGPROB_ROWS = 128  # rows of logits in memory at once: 64 MiB with a vocabulary of 128k


@dataclass(frozen=True, slots=True)
class Choices:
    """The next token of each row, on the device until `read`."""

    token_ids: torch.Tensor  # [rows] int64
    # host copies of the token ids and of each row's highest logit, valid once the device is done
    _read: tuple[torch.Tensor, torch.Tensor]
    _logprobs: "_Logprobs | None"

    def read(self) -> list[SampledToken]:
        """Return the chosen tokens. Call it after the device has ended the step."""
        ids, tops = (part.tolist() for part in self._read)
        logprobs = self._logprobs.by_row(len(ids)) if self._logprobs is not None else [None] * len(ids)
        return [SampledToken(*row) for row in zip(ids, map(math.isfinite, tops), logprobs, strict=True)]


def choose_tokens(logits: torch.Tensor, rows: SequenceOf[ChoiceRow]) -> Choices:
    """Choose a token for each row of logits [rows, vocab] fp32, which may be changed.

    Does not wait for the device.
    """
    adjusted = [(i, row.sampling, row.counts) for i, row in enumerate(rows) if row.counts is not None]
    if adjusted:
        entries = _entries(adjusted, logits.device)
        before = penalize_(logits, entries)
    masked = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
    if masked:
        at = to_device(torch.tensor([i for i, _ in masked]), logits.device)
        unmasked = logits.index_select(0, at) if any(row.sampling.num_logprobs is not None for row in rows) else None
        mask_(logits, at, _mask_bits([mask for _, mask in masked], logits.device))
    if any([row.sampling.temperature for row in rows]):
        batch = SamplingBatch.of(list(map(_row, rows)), logits.shape[1], lambda rows: to_device(rows, logits.device))
        token_ids, tops = sample(logits, batch)
    else:
        token_ids, tops = argmax(logits)
    if masked and unmasked is not None:  # reported log probabilities are those without masks
        logits.index_copy_(0, at, unmasked)
    if adjusted:
        restore_(logits, entries, before)
    logprobs = _logprobs(logits, token_ids, [row.sampling for row in rows])
    return Choices(token_ids, (to_host(token_ids), to_host(tops)), logprobs)


def _mask_bits(masks: "list[array[int]]", device: torch.device) -> torch.Tensor:
    joined = array("i")
    for mask in masks:
        joined.extend(mask)
    return to_device(torch.frombuffer(joined, dtype=torch.int32).view(len(masks), -1), device)


def _row(row: ChoiceRow) -> SamplingRow:
    p = row.sampling
    return SamplingRow(p.temperature, p.top_k, p.top_p, p.min_p, p.seed & _MASK64, row.position)


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The reported log probabilities of prompt tokens, being copied to the host until `read`."""

    _parts: list[tuple[torch.Tensor, ...]]  # per piece of rows: the results of token_logprobs, and the ranks
    _num_top: int

    def read(self) -> tuple[TokenLogprobs, ...]:
        """Return the log probabilities. Call it after the device has ended the step."""
        return tuple(
            replace(message, rank=rank)
            for chosen, ids, top, ranks in self._parts
            for message, rank in zip(
                _as_messages(chosen, ids, top, [self._num_top] * len(chosen)), ranks.tolist(), strict=True
            )
        )


def prompt_logprobs(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token_ids: "array[int]",
    num_top: int,
    size: int = _PROMPT_LOGPROB_ROWS,
) -> PromptLogprobs:
    """Return the logprob and rank of each of `token_ids`. Does not wait for the device.

    `size`: number of rows of logits in memory at once.
    `hidden` [tokens, hidden]: for each of these tokens, the hidden state of the token before it.
    """
    targets = to_device(torch.frombuffer(token_ids, dtype=torch.int64), hidden.device)
    parts = []
    for some, wanted in zip(torch.split(hidden, size), torch.split(targets, size), strict=True):
        given = logits(some)
        taken = (*token_logprobs(given, wanted, num_top), token_ranks(given, wanted))
        parts.append(tuple([to_host(part) for part in taken]))
    return PromptLogprobs(parts, num_top)


def _entries(adjusted: SequenceOf[tuple[int, SamplingParams, CountEntries]], device: torch.device) -> LogitEntries:
    """Return the penalties and biases of all adjusted rows, concatenated."""
    params, counted = [p for _, p, _ in adjusted], [counts for _, _, counts in adjusted]
    by_row = torch.tensor(
        [
            [row for row, _, _ in adjusted],
            [p.repetition_penalty for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        ]
    )
    lengths = torch.tensor([len(counts.token_ids) for counts in counted])
    rows, repetition, presence, frequency = to_device(by_row.repeat_interleave(lengths, dim=1), device).unbind()
    return LogitEntries(
        rows.long(),
        token_ids=to_device(_joined((counts.token_ids for counts in counted), "q", torch.int64), device),
        bias=to_device(_joined((counts.bias for counts in counted), "f", torch.float32), device),
        seen=to_device(_joined((counts.seen for counts in counted), "f", torch.float32), device),
        num_outputs=to_device(_joined((counts.num_outputs for counts in counted), "f", torch.float32), device),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
    )


def _joined(parts: "Iterable[array[int]] | Iterable[array[float]]", code: str, dtype: torch.dtype) -> torch.Tensor:
    joined: array[Any] = array(code)
    for part in parts:
        joined.extend(part)
    return torch.frombuffer(joined, dtype=dtype) if joined else torch.empty(0, dtype=dtype)


@dataclass(frozen=True, slots=True)
class _Logprobs:
    rows: list[int]  # rows whose log probabilities are requested
    num_top: list[int]
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # as returned by token_logprobs, being copied to the host

    def by_row(self, num_rows: int) -> list[TokenLogprobs | None]:
        reported: list[TokenLogprobs | None] = [None] * num_rows
        for row, message in zip(self.rows, _as_messages(*self.tensors, self.num_top), strict=True):
            reported[row] = message
        return reported


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, params: SequenceOf[SamplingParams]) -> _Logprobs | None:
    wanted = [i for i, p in enumerate(params) if p.num_logprobs is not None]
    if not wanted:
        return None
    num_top = [params[i].num_logprobs or 0 for i in wanted]
    rows = to_device(torch.tensor(wanted), logits.device)
    chosen, ids, top = token_logprobs(logits.index_select(0, rows), token_ids.index_select(0, rows), max(num_top))
    return _Logprobs(wanted, num_top, (to_host(chosen), to_host(ids), to_host(top)))


def _as_messages(
    chosen: torch.Tensor, top_ids: torch.Tensor, top: torch.Tensor, num_top: SequenceOf[int]
) -> list[TokenLogprobs]:
    rows = zip(chosen.tolist(), top_ids.tolist(), top.tolist(), num_top, strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(ids[:n], logprobs[:n], strict=True))) for logprob, ids, logprobs, n in rows
    ]
