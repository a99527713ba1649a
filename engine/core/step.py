"""One step's input and results as values.

The input is everything that a runner, on this rank or another, needs to compute it. Arrays with an entry per token begin with the tokens of decodes
(one token after a cached prefix, and drafts after it); those of prompt chunks follow. ChoiceRows need the tokens of the previous step, so they are
sent later. chunk_steps.py makes the input from sequences; this module is independent of sequences, tensors and devices.
"""

from array import array
from collections.abc import Mapping
from typing import NamedTuple

from pilotlight.engine.api.protocol import Pooling, SamplingParams, TokenLogprobs
from pilotlight.engine.api.struct import Struct
from pilotlight.engine.core.token_counts import CountEntries


class BlockTables(NamedTuple):
    """Block tables of some chunks, one row each."""

    blocks: "array[int]"
    width: int  # blocks per row

    @property
    def rows(self) -> "list[array[int]]":
        return [self.blocks[i : i + self.width] for i in range(0, len(self.blocks), self.width or 1)]


class GroupInput(NamedTuple):
    """The blocks and slots of one group of a model's layers for the step's tokens."""

    slots: "array[int]"  # one per token
    decodes: BlockTables  # width is a power of two
    prompts: BlockTables  # width is that of the longest table

    @property
    def tables(self) -> "list[array[int]]":
        """Return each chunk's table."""
        return self.decodes.rows + self.prompts.rows


class PromptLogprobsInput(NamedTuple):
    """Prompt tokens whose log probabilities are reported, each from the logits of the token before it."""

    chunk: int
    row: int  # row of the token before the first of `token_ids`
    token_ids: "array[int]"
    num_top: int


class PoolingInput(NamedTuple):
    """A chunk of a text that becomes an embedding."""

    chunk: int
    kind: Pooling
    text: int  # the same number for all chunks of a text
    is_first: bool
    is_last: bool
    num_tokens: int  # number of tokens of the whole text


class ImageInput(NamedTuple):
    """Tokens of a step that represent an image."""

    name: bytes
    first: int  # index of the first embedding among those of the image
    rows: "array[int]"  # the step's tokens that are replaced by this and the following embeddings
    columns: int = 0  # embeddings per row of the image if they are rotated by row and column, else 0


class StepInput(NamedTuple):
    num_decodes: int  # number of decode chunks, which come first
    checks_drafts: bool  # True if some decodes have several tokens: drafts, or replayed output
    lengths: tuple[int, ...]  # number of tokens of each chunk, including drafts
    context_lens: tuple[int, ...]  # per chunk: its cached tokens plus its own
    token_ids: "array[int]"
    positions: "array[int]"  # for rotary embedding: indices in the sequences, except in and after images
    groups: tuple[GroupInput, ...]
    logit_rows: "array[int] | None"  # tokens whose logits are needed; None for all
    # (token of this step, row of the previous step that chose its id): only the device knows the id yet
    feeds: tuple[tuple[int, int], ...] = ()
    prompt_logprobs: tuple[PromptLogprobsInput, ...] = ()
    pooling: tuple[PoolingInput, ...] = ()
    started_texts: frozenset[int] = frozenset()  # texts of which only a part has been computed so far
    adapter_slots: "array[int] | None" = None  # one per token, -1 for no adapter; None if no token has one
    images: tuple[ImageInput, ...] = ()
    token_types: "array[int] | None" = None  # one per token, 1 in a pair's second text; None if there are no pairs
    # One per token: the last position in its sequence that it sees, beyond its own in an image whose tokens attend to each other; None without such
    # images.
    last_visible: "array[int] | None" = None

    @property
    def table_width(self) -> int:
        """Return the number of blocks to which all block tables of decodes are padded."""
        return self.groups[0].decodes.width

    def repeated(self, times: int) -> "StepInput":
        """Return the step with `times` copies of its first decode appended.

        A copy writes the same values to the same places as its original.
        """
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
    position: int  # position of the chosen token
    sampling: SamplingParams
    counts: CountEntries | None = None  # the counts for the row's penalties and biases
    # bit mask over the vocabulary as 32-bit words: a bit is set if the token is allowed; None if all are
    mask: "array[int] | None" = None


GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def greedy_rows(step: StepInput) -> list[ChoiceRow]:
    rows = range(len(step.token_ids)) if step.logit_rows is None else step.logit_rows
    return [ChoiceRow(i, step.positions[row] + 1, GREEDY) for i, row in enumerate(rows)]


class SampledToken(Struct, frozen=True, gc=False):
    token_id: int
    is_finite: bool  # whether the logits from which it was chosen were finite
    logprobs: TokenLogprobs | None = None


class RunResult(NamedTuple):
    tokens: list[SampledToken]  # one per ChoiceRow
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]]  # by the chunk's index in the step
    embeddings: Mapping[int, tuple[float, ...]]  # by the chunk's index in the step
    device_s: float  # from the launch until the tokens are on the host
