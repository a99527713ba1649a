"""Logit bias and the penalties against repetition, applied only to the logits that they change.

The order is vLLM's (its sampler's docstring), before temperature and truncation:

1. logit bias (OpenAI): `logit += bias`.
2. repetition penalty (Keskar et al., "CTRL", 2019, as in Hugging Face and vLLM), for every token in the prompt or
the output: `logit = logit / r if logit > 0 else logit * r`.
3. frequency and presence penalty (OpenAI), for every token in the output:
`logit -= frequency * count in the output + presence`.

Entries are sparse: a conversation of 4,000 tokens touches about a thousand of 128,000 logits, so a gather and a scatter of them replace counts over
the whole vocabulary (32 MB a step for 64 rows). Each entry is computed independently of the other rows of the batch.
"""

from typing import NamedTuple

import torch

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.dispatch import operation


class LogitEntries(NamedTuple):
    """The logits to change, and their penalties. No (row, token) occurs twice."""

    rows: torch.Tensor  # [entries] int64
    token_ids: torch.Tensor  # [entries] int64
    bias: torch.Tensor  # [entries] fp32
    seen: torch.Tensor  # [entries] fp32: 1 for a token of the prompt or the output, else 0
    num_outputs: torch.Tensor  # [entries] fp32: how often the token occurs in the output
    repetition: torch.Tensor  # [entries] fp32 > 0 (1: off)
    presence: torch.Tensor  # [entries] fp32 (0: off)
    frequency: torch.Tensor  # [entries] fp32 (0: off)


def _check(
    check: ArgumentCheck, logits: torch.Tensor, entries: LogitEntries, before: torch.Tensor | None = None
) -> None:
    check.tensor("logits", logits, "rows vocab", (torch.float32,), dense=2)
    for name, values in entries._asdict().items():
        dtype = torch.int64 if name in ("rows", "token_ids") else torch.float32
        check.tensor(f"entries.{name}", values, "entries", (dtype,))
    if before is not None:
        check.tensor("before", before, "entries", (torch.float32,))
    check.indices("entries.rows", entries.rows, logits.shape[0], "the rows of logits")
    check.indices("entries.token_ids", entries.token_ids, logits.shape[1], "the vocabulary")


@operation(_check, triton="sampling.penalties")
def penalize_(logits: torch.Tensor, entries: LogitEntries) -> torch.Tensor:
    """Apply penalties to logits [rows, vocab] fp32, contiguous, in place.

    Return the former values [entries]. `restore_` puts them back.
    """
    places = _places(logits, entries)
    before = logits.view(-1).index_select(0, places)
    biased = before + entries.bias
    factor = torch.where(biased > 0, entries.repetition.reciprocal(), entries.repetition)
    repeated = torch.where(entries.seen > 0, biased * factor, biased)
    penalty = entries.frequency * entries.num_outputs + entries.presence * (entries.num_outputs > 0)
    logits.view(-1).scatter_(0, places, repeated - penalty)
    return before


@operation(_check, triton="sampling.penalties")
def restore_(logits: torch.Tensor, entries: LogitEntries, before: torch.Tensor) -> None:
    """Restore the logits that `penalize_` changed."""
    logits.view(-1).scatter_(0, _places(logits, entries), before)


def _places(logits: torch.Tensor, entries: LogitEntries) -> torch.Tensor:
    # One flat index is faster than indexing by pairs: on a CPU 0.09 ms instead of 0.65 for 100,000 entries.
    return entries.rows * logits.shape[1] + entries.token_ids
