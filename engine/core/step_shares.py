"""Division of a step among ranks that have separate sequences.

Each rank computes its share, and the needed rows are then joined in their original order. A chunk's blocks determine its rank: block b belongs to
rank b % num_ranks, where it is block b // num_ranks (engine/kv/lending/slabs.py). Every rank divides the same step itself, and so knows how many rows
the others have. This module is independent of tensors and messages.
"""

from array import array
from collections.abc import Iterable
from itertools import accumulate, chain

from pilotlight.engine.core.step import BlockTables, GroupInput, StepInput


class StepShares:
    def __init__(self, step: StepInput, num_ranks: int, block_size: int, every_row: bool) -> None:
        """`every_row`: the hidden states of all tokens are needed, not only those for logits."""
        self.step = step
        self._num_ranks = num_ranks
        self._block_size = block_size
        self._ranks = [table[0] % num_ranks for table in step.groups[0].tables]  # rank of each chunk
        starts = accumulate(step.lengths, initial=0)
        self._spans = [range(start, start + length) for start, length in zip(starts, step.lengths, strict=False)]
        rank_of = list(chain.from_iterable([[r] * n for r, n in zip(self._ranks, step.lengths, strict=True)]))
        wanted = range(len(step.token_ids)) if every_row or step.logit_rows is None else step.logit_rows
        self._wanted: list[list[int]] = [
            [] for _ in range(num_ranks)
        ]  # per rank, the step's tokens whose rows are needed
        places: list[list[int]] = [[] for _ in range(num_ranks)]
        for place, token in enumerate(wanted):
            self._wanted[rank_of[token]].append(token)
            places[rank_of[token]].append(place)
        self._places = list(chain.from_iterable(places))

    @property
    def num_wanted(self) -> list[int]:
        """Return the number of needed rows of each rank."""
        return [len(tokens) for tokens in self._wanted]

    @property
    def order(self) -> list[int]:
        """Return, for each needed row in the step's order, its index in the concatenated rows of the ranks."""
        return sorted(range(len(self._places)), key=self._places.__getitem__)

    def wanted_of(self, rank: int) -> list[int]:
        """Return the indices of the needed rows among a rank's own tokens."""
        place = self._own_places(rank)
        return [place[token] for token in self._wanted[rank]]

    def of(self, rank: int) -> StepInput | None:
        """Return a rank's share of the step, with the rank's own block numbers; None if it has no chunk.

        The share has no requests for log probabilities or pooling: the first rank computes these from the hidden states.
        """
        step, own = self.step, [i for i, of in enumerate(self._ranks) if of == rank]
        if not own:
            return None
        place, spans = self._own_places(rank), [self._spans[i] for i in own]
        images = tuple(
            [
                image._replace(rows=array("q", [place[row] for row in image.rows]))
                for image in step.images
                if image.rows[0] in place
            ]
        )
        return step._replace(
            num_decodes=sum(i < step.num_decodes for i in own),
            lengths=tuple([step.lengths[i] for i in own]),
            context_lens=tuple([step.context_lens[i] for i in own]),
            token_ids=_parts(step.token_ids, spans),
            positions=_parts(step.positions, spans),
            groups=tuple([self._group(group, own, spans) for group in step.groups]),
            logit_rows=None,
            feeds=tuple([(place[token], row) for token, row in step.feeds if token in place]),
            prompt_logprobs=(),
            pooling=(),
            token_types=None if step.token_types is None else _parts(step.token_types, spans),
            adapter_slots=None if step.adapter_slots is None else _parts(step.adapter_slots, spans),
            last_visible=None if step.last_visible is None or not images else _parts(step.last_visible, spans),
            images=images,
        )

    def _own_places(self, rank: int) -> dict[int, int]:
        """Map each of the step's tokens that a rank computes to its index among that rank's tokens."""
        own = [span for span, of in zip(self._spans, self._ranks, strict=True) if of == rank]
        return {token: place for place, token in enumerate(chain.from_iterable(own))}

    def _group(self, group: GroupInput, own: list[int], spans: list[range]) -> GroupInput:
        size, num_ranks, decodes = self._block_size, self._num_ranks, self.step.num_decodes
        slots = [slot // (size * num_ranks) * size + slot % size for slot in _parts(group.slots, spans)]
        return GroupInput(
            array("q", slots),
            self._tables(group.decodes, [i for i in own if i < decodes]),
            self._tables(group.prompts, [i - decodes for i in own if i >= decodes]),
        )

    def _tables(self, tables: BlockTables, own: list[int]) -> BlockTables:
        width = tables.width
        rows = [tables.blocks[i * width : (i + 1) * width] for i in own]
        return BlockTables(array("q", [block // self._num_ranks for row in rows for block in row]), width)


def _parts(numbers: "array[int]", spans: Iterable[range]) -> "array[int]":
    found = array("q")
    for span in spans:
        found += numbers[span.start : span.stop]
    return found
