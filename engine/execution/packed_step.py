"""A step's numbers, packed to be copied to the device in one transfer. A model reads views of them."""

from array import array
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

import torch

from pilotlight.engine.core.step import StepInput
from pilotlight.engine.device.transfer import to_device
from pilotlight.engine.execution.batch import Batch, DecodeBatch, GroupBatch
from pilotlight.engine.execution.state_places import StateGroups, StatePlaces
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.state.state_batch import StateBatch


class PackedStates(NamedTuple):
    """The places of a group's states among the numbers of a step: the slices of a StateBatch's parts."""

    before: slice
    first_runs: slice
    ends: slice
    after: slice
    of_sequences: tuple[tuple[int, ...], ...]  # host_ends of the StateBatch

    def batch(self, there: torch.Tensor) -> StateBatch:
        before, first_runs, ends, after, of_sequences = self
        return StateBatch(there[before], there[first_runs], there[ends], there[after], of_sequences)


class PackedStep(NamedTuple):
    """A step's numbers in one array, with the slice of each part.

    Feeds and rows of logits come last, because their number differs among the steps that share a recording.
    """

    step: StepInput
    # token ids, positions, slots of each group, adapter slots and token types if there are any; then the parts below
    numbers: "array[int]"
    decode_lens: slice
    tables: list[tuple[slice, slice]]  # per group: the block tables of decodes, then those of prompts
    # starts and context lengths as int32: those of decodes, if they check drafts, then those of prompts
    varlens: tuple[slice, slice, slice, slice]
    last_visible: slice  # as int32, of the tokens of prompts
    states: dict[int, PackedStates]  # of each group of layers that keeps states, by group number
    feeds: slice  # indices of tokens, then the rows of the previous step that chose them
    logit_rows: slice

    @classmethod
    def of(cls, step: StepInput, state_groups: StateGroups = MappingProxyType({})) -> "PackedStep":
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
        ahead = array("i", (step.last_visible or array("q"))[sum(step.lengths[:decodes]) :])
        last_visible = _append(numbers, _in_pairs(ahead))
        states = {}
        for number, block_size in state_groups.items():
            places = StatePlaces.of(step, step.groups[number], block_size)
            before, first_runs, ends, after = (_append(numbers, part) for part in places[:4])
            states[number] = PackedStates(before, first_runs, ends, after, places.of_sequences)
        feeds = _append(numbers, array("q", [number for column in zip(*step.feeds, strict=True) for number in column]))
        logit_rows = _append(numbers, step.logit_rows or array("q"))
        return cls(step, numbers, decode_lens, tables, varlens, last_visible, states, feeds, logit_rows)

    def feed(self, there: torch.Tensor, chosen: torch.Tensor | None) -> None:
        """Write the ids that the previous step chose (`chosen`) to `there`, the step's numbers on the device."""
        if self.step.feeds:
            assert chosen is not None, "a token is pending and no step has chosen it"
            places, rows = there[self.feeds].view(2, -1).unbind()
            there[: self.feeds.start].index_copy_(0, places, chosen.index_select(0, rows))

    def logit_rows_in(self, there: torch.Tensor) -> torch.Tensor | None:
        return None if self.step.logit_rows is None else there[self.logit_rows]

    def batch(self, there: torch.Tensor, longest: int | None = None) -> Batch:
        """Return the batch as views of `there`, the numbers on the device.

        `longest`: limit of the contexts of decodes in a recorded step; None to use the longest one in this step.
        """
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
        for number, (slot_mapping, (decode_at, prompt_at)) in enumerate(zip(slots, self.tables, strict=True)):
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
                if step.last_visible is not None:
                    ahead = there[self.last_visible].view(torch.int32)[: tokens - num_decoded]
                    prefill = prefill._replace(last_visible=ahead)
            packed = self.states.get(number)
            states = None if packed is None else packed.batch(there)
            groups.append(GroupBatch(slot_mapping, decode, verify, prefill, states))
        logit_rows = self.logit_rows_in(there)
        return Batch(token_ids, positions, tuple(groups), num_decoded, logit_rows, adapter_slots, token_types)

    def _varlen(
        self, there: torch.Tensor, tables: torch.Tensor, at: int, lengths: tuple[int, ...], contexts: tuple[int, ...]
    ) -> VarlenBatch:
        starts, lens = (there[self.varlens[i]].view(torch.int32) for i in (at, at + 1))
        return VarlenBatch(tables, starts[: len(lengths) + 1], lens[: len(lengths)], lengths, contexts)


def build_batch(
    step: StepInput,
    device: torch.device,
    chosen: torch.Tensor | None = None,
    state_groups: StateGroups = MappingProxyType({}),
) -> Batch:
    """Copy a step to a device in one transfer, without waiting.

    `chosen`: the tokens that the previous step chose, on the device.
    """
    packed = PackedStep.of(step, state_groups)
    there = to_device(torch.frombuffer(packed.numbers, dtype=torch.int64), device)
    packed.feed(there, chosen)
    return packed.batch(there)


def _append(numbers: "array[int]", more: "array[int]") -> slice:
    """Append numbers at a 16-byte boundary; return their slice.

    A kernel would be compiled again for an argument that is not aligned.
    """
    if more and len(numbers) % 2:
        numbers.append(0)
    start = len(numbers)
    numbers += more
    return slice(start, len(numbers))


def _append_varlen(numbers: "array[int]", step: StepInput, chunks: slice) -> tuple[slice, slice]:
    """Append the starts of chunks and their context lengths; return the slices.

    Starts are token indices, counted from the first chunk's first token, followed by the end of the last chunk.
    """
    lengths = step.lengths[chunks]
    if not lengths:
        return slice(0), slice(0)
    starts, contexts = array("i", accumulate(lengths, initial=0)), array("i", step.context_lens[chunks])
    return _append(numbers, _in_pairs(starts)), _append(numbers, _in_pairs(contexts))


def _in_pairs(numbers: "array[int]") -> "array[int]":
    """Return 32-bit numbers packed in pairs into 64-bit ones."""
    numbers.extend([0] * (len(numbers) % 2))
    return array("q", numbers.tobytes())
