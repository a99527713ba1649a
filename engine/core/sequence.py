"""One generation inside the engine: its tokens, how many of them are computed, and its blocks.

A sequence is independent of its scheduler. `num_computed_tokens` counts tokens whose keys and values are in the cache:

0 <= num_completed_tokens <= num_computed_tokens <= len(token_ids) = prompt + output; the last token is computed
by the step that samples the next one

If steps overlap, a step is launched while the previous one still runs. Tokens of a launched step count as computed, and the token that it samples is
PENDING in `token_ids`. When its results arrive, its tokens count as completed. Drafts are not in `token_ids`: accepted ones are appended, and count
as computed, when the results arrive.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from pilotlight.engine.api.protocol import (
    AdapterSource,
    BlockSource,
    Constraint,
    ErrorCode,
    Pooling,
    SamplingParams,
    TokenLogprobs,
)
from pilotlight.engine.core.token_counts import TokenCounts
from pilotlight.engine.grammar.matcher import Matcher
from pilotlight.engine.images.prompt import SequenceImage
from pilotlight.engine.kv.pool.block_table import BlockTable

PENDING = -1  # placeholder for a token that a launched step chooses and that the host does not know yet


class Arrival(NamedTuple):
    """The order of sequences: the youngest is preempted first."""

    since_s: float  # time of the request's first submission to any host, by the scheduler's clock
    number: int  # different for each sequence


_NOT_SUBMITTED = Arrival(0.0, 0)


@dataclass(eq=False, slots=True)
class Sequence:
    sequence_id: str
    token_ids: list[int]
    sampling: SamplingParams
    chain_root: bytes = b""
    num_delivered_tokens: int = 0  # tokens at the prompt's end that are output of the sequence that this one continues
    tenant: bytes = b""
    priority: int = 0  # more urgent than `own_priority` while another host computes the prompt
    own_priority: int = 0  # the priority if blocks of that host are missing
    pooling: Pooling | None = None
    constraint: Constraint | None = None
    matcher: Matcher | None = None  # state in the grammar; None without a grammar, or while it is being compiled
    why_unconstrained: tuple[ErrorCode, str] | None = None  # why its grammar cannot be enforced
    adapter: AdapterSource | None = None
    adapter_slot: int = -1  # slot that the sequence holds; -1 without an adapter, or while the adapter is in no slot
    why_unadapted: str = ""  # why its adapter is not available
    images: tuple[SequenceImage, ...] = ()  # images in its prompt, in order
    second_from: int = 0  # index of the first token of a pair's second text; 0 without one
    num_prompt_tokens: int = field(init=False)
    counts: TokenCounts | None = field(init=False)  # None if penalties and biases are off
    may_be_masked: bool = field(init=False)  # True if some tokens may be forbidden
    replays: bool = False  # see SchedulerLimits
    length_limit: int = 0  # number of tokens, including the prompt, at which the sequence ends
    waited_s: float = 0.0  # seconds that its request waited at hosts or sites that are lost
    arrival: Arrival = _NOT_SUBMITTED
    num_computed_tokens: int = 0
    num_completed_tokens: int = 0
    # number of times that the sequence lost its blocks (also at its end) or was rewound; results of chunks of an earlier epoch are dropped
    epoch: int = 0
    # True if the next chunk needs results that have not arrived: the number of accepted drafts, or a token that cannot be fed on the device
    awaits_tokens: bool = False
    share: int = 0  # number of the pool's share that has its blocks; each rank with separate sequences has a share
    tables: list[BlockTable] = field(default_factory=list)  # one per group of layers; empty without blocks
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0  # complete blocks of each table, registered by name
    num_disk_blocks: int | None = None  # blocks that were read for it from the disk tier; None if not requested
    num_store_blocks: int | None = None  # blocks that were read for it from the store; None if not requested
    source: BlockSource | None = None  # the host from which to request its blocks, once
    hands_over: bool = False  # True if another host fetches its blocks
    num_peer_blocks: int = 0  # blocks that `source` has sent, of all groups
    num_cached_tokens: int | None = None  # prompt tokens that were cached when it was first scheduled
    num_fetched_tokens: int = 0  # cached tokens that `source` has computed
    started: bool = False  # True once an output has been published
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    added_at: float = 0.0  # time of submission, by the scheduler's clock
    queue_us: int = 0  # from `added_at` until its first admission
    device_us: float = 0.0  # the sequence's share of the device time of steps that no output has reported yet

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.may_be_masked = self.constraint is not None or self.sampling.min_tokens > 0
        self.counts = None
        if self.sampling.adjusts_logits:
            self.counts = TokenCounts(self.sampling, self.first_output)

    @property
    def lacks_grammar(self) -> bool:
        """True if it cannot continue because the grammar that it must follow is missing."""
        if self.constraint is None or self.matcher is not None:
            return False
        return not self.constraint.is_optional or (self.why_unconstrained or ("",))[0] == "overloaded"

    @property
    def owner(self) -> tuple[int, bytes]:
        """Return the key of the sequences that together get one share of a step's prompt tokens."""
        return self.priority, self.tenant

    @property
    def min_length(self) -> int:
        """Return the total number of tokens below which it must not end."""
        return self.first_output + self.sampling.min_tokens

    @property
    def first_output(self) -> int:
        """Return the index of the first output token, delivered or not."""
        return self.num_prompt_tokens - self.num_delivered_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks that it holds, in all groups of layers."""
        return sum([table.num_held for table in self.tables])

    @property
    def has_computed_prompt(self) -> bool:
        """True if all of its prompt's blocks are in the cache, or were when it was last preempted."""
        return self.num_completed_tokens >= self.num_prompt_tokens or self.started

    @property
    def is_decoding(self) -> bool:
        """True if only its newest token is missing from the cache, and kernels of decodes compute it."""
        first = self.first_output if self.replays else 1
        return self.num_computed_tokens >= first and self.num_uncomputed_tokens == 1

    @property
    def is_pending(self) -> bool:
        """True if its newest token is not known yet."""
        return self.token_ids[-1] == PENDING

    @property
    def num_ready_tokens(self) -> int:
        """Return how many tokens can be computed now: 0 while a result that they depend on is missing."""
        num_tokens = len(self.token_ids)
        if self.awaits_tokens or (num_tokens >= self.length_limit and self.is_pending):
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs and not self.started

    @property
    def needs_every_token(self) -> bool:
        """True if every token must be computed.

        That is the case if log probabilities of the prompt, or all hidden states, are needed, because the cache does not contain them.
        """
        return self.first_needed_token == 0

    @property
    def first_needed_token(self) -> int | None:
        """Return the index of the first token to compute even if it is cached; None if it is the last token."""
        if self.pooling in ("mean", "cls"):
            return 0
        return self.sampling.prompt_logprobs_from - 1 if self.wants_prompt_logprobs else None

    def shares_prompt_with(self, other: "Sequence") -> bool:
        """True if the prompts are equal and this sequence can use blocks that the other one has computed."""
        return (
            other is not self
            and other.chain_root == self.chain_root
            and other.token_ids[: other.num_prompt_tokens] == self.token_ids[: self.num_prompt_tokens]
            and other.images == self.images
            and not self.needs_every_token
        )

    def take_device_us(self) -> int:
        """Return the device time to report with the next output, in whole microseconds; keep the remainder."""
        told = int(self.device_us)
        self.device_us -= told
        return told

    def rewind(self, unit: int = 1) -> None:
        """Reset the computed tokens to those of collected steps, rounded down to a multiple of `unit`.

        The blocks stay; values of later tokens in them are overwritten before they are read.
        """
        self._drop_pending()
        kept = self.num_completed_tokens // unit * unit
        if self.pooling is not None and kept < self.num_completed_tokens:
            kept = 0  # the tokens after `kept` are already pooled, which cannot be undone
        first_reported = max(1, self.sampling.prompt_logprobs_from)
        del self.prompt_logprobs[max(0, kept + 1 - first_reported) :]
        self.num_computed_tokens = self.num_completed_tokens = kept
        self.epoch += 1

    def forget_computed(self) -> None:
        """Reset the computed tokens after preemption. A pending token is removed and later chosen again."""
        self._drop_pending()
        self.tables = []
        self.share = 0
        self.num_computed_tokens = self.num_completed_tokens = 0
        self.num_registered_blocks = 0
        self.num_disk_blocks = self.num_store_blocks = None
        self.prompt_logprobs = []

    def _drop_pending(self) -> None:
        self.awaits_tokens = False
        if self.is_pending:
            self.token_ids.pop()
