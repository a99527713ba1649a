"""One step's input as a value: all that a runner, on this rank or another, needs to compute it, and nothing that changes meanwhile.

Arrays and plain values, token after token, first decodes (one token behind a cached prefix, and drafts behind it), then prompt chunks. What follows
the tokens of the step before comes later, as rows of the choice. Knows blocks and positions; refuses to know tensors, devices and sequences:
chunk_steps.py makes it.
"""

from array import array
from typing import NamedTuple

from pilotlight.engine.api.protocol import Pooling, SamplingParams
from pilotlight.engine.api.struct import Struct
from pilotlight.engine.execution.token_counts import CountEntries


class BlockTables(NamedTuple):
    """Block tables of some chunks, a row each."""

    blocks: "array[int]"
    width: int  # of a row

    @property
    def rows(self) -> "list[array[int]]":
        return [self.blocks[i : i + self.width] for i in range(0, len(self.blocks), self.width or 1)]


class GroupInput(NamedTuple):
    """Where one group of a model's layers keeps the step's tokens."""

    slots: "array[int]"  # of every token
    decodes: BlockTables  # as wide as a power of two
    prompts: BlockTables  # as wide as the longest

    @property
    def tables(self) -> "list[array[int]]":
        """Each chunk's table."""
        return self.decodes.rows + self.prompts.rows


class PromptLogprobsInput(NamedTuple):
    """Tokens of a prompt whose log probabilities are to be reported, each under the logits of the token before it."""

    chunk: int
    row: int  # of the first token before one of them
    token_ids: "array[int]"
    num_top: int


class PoolingInput(NamedTuple):
    """A chunk of a text that becomes an embedding."""

    chunk: int
    kind: Pooling
    text: int  # the same number for all chunks of a text
    is_first: bool
    is_last: bool
    num_tokens: int  # of the whole text


class ImageInput(NamedTuple):
    """Tokens of a step that an image stands for."""

    name: bytes
    first: int  # of its embeddings
    rows: "array[int]"  # tokens of the step, one for each of the embeddings from there on


class StepInput(NamedTuple):
    num_decodes: int  # chunks before the prompts
    checks_drafts: bool  # some of these have several tokens
    lengths: tuple[int, ...]  # tokens of each chunk, drafts among them
    context_lens: tuple[int, ...]  # of each chunk: what is cached before it, and its tokens
    token_ids: "array[int]"
    positions: "array[int]"
    groups: tuple[GroupInput, ...]
    logit_rows: "array[int] | None"  # tokens whose logits are wanted; None: all of them
    # (token, row of the step before): what that row chose, which is known on the device alone
    feeds: tuple[tuple[int, int], ...] = ()
    prompt_logprobs: tuple[PromptLogprobsInput, ...] = ()
    pooling: tuple[PoolingInput, ...] = ()
    begun_texts: frozenset[int] = frozenset()  # of which a part has been computed, and the rest is still wanted
    adapter_slots: "array[int] | None" = None  # of every token, -1: it has none; None: no token has one
    images: tuple[ImageInput, ...] = ()
    token_types: "array[int] | None" = None  # of every token, 1: it is of a pair's second text; None: none is

    @property
    def table_width(self) -> int:
        """Blocks in the longest of the decodes' tables, as they are padded."""
        return self.groups[0].decodes.width

    def repeated(self, times: int) -> "StepInput":
        """Return the same decodes with the first so many times more behind the others: they write what that writes, where it writes it."""
        if not times:
            return self
        tokens, each, width = len(self.token_ids), self.lengths[0], self.table_width
        feeds = self.feeds
        if feeds and feeds[0][0] == 0:
            feeds += tuple([(tokens + i * each, feeds[0][1]) for i in range(times)])
        return self._replace(
            num_decodes=self.num_decodes + times,
            lengths=self.lengths + self.lengths[:1] * times,
            context_lens=self.context_lens + self.context_lens[:1] * times,
            token_ids=self.token_ids + self.token_ids[:each] * times,
            positions=self.positions + self.positions[:each] * times,
            groups=tuple(
                [
                    group._replace(
                        slots=group.slots + group.slots[:each] * times,
                        decodes=BlockTables(group.decodes.blocks + group.decodes.blocks[:width] * times, width),
                    )
                    for group in self.groups
                ]
            ),
            feeds=feeds,
            adapter_slots=self.adapter_slots and self.adapter_slots + self.adapter_slots[:each] * times,
        )


class ChoiceRow(Struct, frozen=True, gc=False):
    """A row of a step's logits that chooses a token."""

    row: int
    position: int  # of the token to be chosen
    sampling: SamplingParams
    counts: CountEntries | None = None  # what its penalties and biases follow
    # a bit for each token that its grammar allows, in words of 32; None: it has no grammar
    mask: "array[int] | None" = None


GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def greedy_rows(step: StepInput) -> list[ChoiceRow]:
    rows = range(len(step.token_ids)) if step.logit_rows is None else step.logit_rows
    return [ChoiceRow(i, step.positions[row] + 1, GREEDY) for i, row in enumerate(rows)]
