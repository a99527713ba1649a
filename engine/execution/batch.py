"""One step's input as tensors: decodes first, prompt chunks behind them, all tokens in one varlen dimension.

A step's numbers are packed one behind the other and copied to the device in one transfer; what a model reads are views of them. Knows tensors,
refuses to know models.
"""

from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from pilotlight.engine.core.step import StepInput
from pilotlight.engine.device.transfer import to_device
from pilotlight.kernels.attention.varlen import VarlenBatch


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    block_tables: torch.Tensor  # [seqs, max_blocks] int64
    context_lens: torch.Tensor  # [seqs] int64
    max_context_len: int


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Where one group of a model's layers finds the tokens of the step, and all before them."""

    slot_mapping: torch.Tensor  # [tokens] int64
    decode: DecodeBatch | None = None
    verify: VarlenBatch | None = None  # in its place, where some of the decodes check drafts
    prefill: VarlenBatch | None = None  # behind them


@dataclass(frozen=True, slots=True)
class Batch:
    token_ids: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64
    groups: tuple[GroupBatch, ...]  # one for each group of layers; most models have one
    num_decoded: int  # the first tokens, of decodes and their drafts
    logit_rows: torch.Tensor | None = None  # [rows] int64, tokens whose logits are wanted; None: all of them
    adapter_slots: torch.Tensor | None = None  # [tokens] int64, -1: none; None: no token has an adapter
    token_types: torch.Tensor | None = None  # [tokens] int64, 1: of a pair's second text; None: no text is a pair


class PackedStep(NamedTuple):
    """A step's numbers, and where they lie. Two steps of as many decodes, tokens and blocks to a table, without prompts, differ in length by
    their feeds and rows of logits alone, which come last."""

    step: StepInput
    numbers: "array[int]"  # token ids, positions, the slots of each group, adapters' slots and types where there are some; then the following
    decode_lens: slice
    tables: list[tuple[slice, slice]]  # of each group: decodes', and prompts'
    # starts and context lengths as int32: of decodes, if they check drafts, and prompts
    varlens: tuple[slice, slice, slice, slice]
    feeds: slice  # tokens, then rows of the choices of the step before
    logit_rows: slice

    @classmethod
    def of(cls, step: StepInput) -> "PackedStep":
        decodes = step.num_decodes
        numbers = step.token_ids + step.positions
        for group in step.groups:
            numbers += group.slots
        if step.adapter_slots is not None:
            numbers += step.adapter_slots
        if step.token_types is not None:
            numbers += step.token_types
        single = () if step.checks_drafts else step.context_lens[:decodes]
        decode_lens = _append(numbers, array("q", single))
        tables = [
            (_append(numbers, group.decodes.blocks), _append(numbers, group.prompts.blocks)) for group in step.groups
        ]
        verified = slice(0, decodes if step.checks_drafts else 0)
        varlens = (*_append_varlen(numbers, step, verified), *_append_varlen(numbers, step, slice(decodes, None)))
        feeds = _append(numbers, array("q", [number for column in zip(*step.feeds, strict=True) for number in column]))
        logit_rows = _append(numbers, step.logit_rows or array("q"))
        return cls(step, numbers, decode_lens, tables, varlens, feeds, logit_rows)

    def feed(self, there: torch.Tensor, chosen: torch.Tensor | None) -> None:
        """Put the tokens in their places that the step before has `chosen` on the device. `there`: the numbers."""
        if self.step.feeds:
            assert chosen is not None, "a token is pending and no step has chosen it"
            places, rows = there[self.feeds].view(2, -1).unbind()
            there[: self.feeds.start].index_copy_(0, places, chosen.index_select(0, rows))

    def logit_rows_in(self, there: torch.Tensor) -> torch.Tensor | None:
        return None if self.step.logit_rows is None else there[self.logit_rows]

    def batch(self, there: torch.Tensor, longest: int | None = None) -> Batch:
        """Return views of the numbers. `longest`: context that the decodes of a recorded step may have; None: as these have."""
        step = self.step
        has_adapters, has_types = step.adapter_slots is not None, step.token_types is not None
        columns = 2 + len(step.groups) + has_adapters + has_types
        tokens, decodes = len(step.token_ids), step.num_decodes
        num_decoded = sum(step.lengths[:decodes])
        contexts = step.context_lens if longest is None else (longest,) * decodes + step.context_lens[decodes:]
        token_ids, positions, *slots = there[: columns * tokens].view(columns, tokens).unbind()
        token_types = slots.pop() if has_types else None
        adapter_slots = slots.pop() if has_adapters else None
        groups = []
        for slot_mapping, (decode_at, prompt_at) in zip(slots, self.tables, strict=True):
            decode = verify = prefill = None
            if decodes:
                rows = there[decode_at].view(decodes, -1)
                if step.checks_drafts:
                    verify = self._varlen(there, rows, 0, step.lengths[:decodes], contexts[:decodes])
                else:
                    decode = DecodeBatch(rows, there[self.decode_lens], max(contexts[:decodes]))
            if lengths := step.lengths[decodes:]:
                rows = there[prompt_at].view(len(lengths), -1)
                prefill = self._varlen(there, rows, 2, lengths, contexts[decodes:])
            groups.append(GroupBatch(slot_mapping, decode, verify, prefill))
        logit_rows = self.logit_rows_in(there)
        return Batch(token_ids, positions, tuple(groups), num_decoded, logit_rows, adapter_slots, token_types)

    def _varlen(
        self, there: torch.Tensor, tables: torch.Tensor, at: int, lengths: tuple[int, ...], contexts: tuple[int, ...]
    ) -> VarlenBatch:
        starts, lens = (there[self.varlens[i]].view(torch.int32) for i in (at, at + 1))
        return VarlenBatch(tables, starts[: len(lengths) + 1], lens[: len(lengths)], lengths, contexts)


def build_batch(step: StepInput, device: torch.device, chosen: torch.Tensor | None = None) -> Batch:
    """Copy a step to a device: in one transfer, for which nobody waits. `chosen`: the tokens of the step before, there."""
    packed = PackedStep.of(step)
    there = to_device(torch.frombuffer(packed.numbers, dtype=torch.int64), device)
    packed.feed(there, chosen)
    return packed.batch(there)


def _append(numbers: "array[int]", more: "array[int]") -> slice:
    """Append numbers where 16 bytes begin, since a kernel is compiled anew for one that starts elsewhere. Return where they lie."""
    if more and len(numbers) % 2:
        numbers.append(0)
    start = len(numbers)
    numbers += more
    return slice(start, len(numbers))


def _append_varlen(numbers: "array[int]", step: StepInput, chunks: slice) -> tuple[slice, slice]:
    """Append where each chunk's tokens begin, counted from the first one's, with the last one's end; and each chunk's context."""
    lengths = step.lengths[chunks]
    if not lengths:
        return slice(0), slice(0)
    starts, contexts = array("i", accumulate(lengths, initial=0)), array("i", step.context_lens[chunks])
    return _append(numbers, _in_pairs(starts)), _append(numbers, _in_pairs(contexts))


def _in_pairs(numbers: "array[int]") -> "array[int]":
    """Return 32-bit numbers two to a 64-bit one."""
    numbers.extend([0] * (len(numbers) % 2))
    return array("q", numbers.tobytes())
