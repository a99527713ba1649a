"""One generation inside the engine: its tokens, how many of them are computed, and the blocks they lie in.

Knows its own lengths; refuses to know its scheduler. `num_computed_tokens` counts tokens whose keys and values are
in the cache:

    0 <= num_completed_tokens <= num_computed_tokens <= len(token_ids) = prompt + output;   the last token is computed
    by the step that samples the next one

Where steps overlap, a step is launched while the one before it still runs: its tokens count as computed, and the token
it samples is in the list as PENDING, until its results are here and it counts as completed. Drafts are in no list: what
is accepted of them is appended, and counts as computed, when the results are here.
"""

from dataclasses import dataclass, field

from pilotlight.engine.api.protocol import (
    AdapterSource,
    BlockSource,
    Constraint,
    ErrorCode,
    Pooling,
    SamplingParams,
    TokenLogprobs,
)
from pilotlight.engine.execution.token_counts import TokenCounts
from pilotlight.engine.grammar.constraints import Matcher
from pilotlight.engine.images.prompt import SequenceImage
from pilotlight.engine.kv.pool.block_table import BlockTable

PENDING = -1  # stands for a token that the device has chosen, or will, and the host does not know yet


@dataclass(eq=False, slots=True)
class Sequence:
    sequence_id: str
    token_ids: list[int]
    sampling: SamplingParams
    chain_root: bytes = b""
    num_delivered_tokens: int = 0  # at the end of the prompt: output of the sequence that this one continues
    tenant: bytes = b""
    priority: int = 0
    pooling: Pooling | None = None
    constraint: Constraint | None = None
    matcher: Matcher | None = None  # where it stands in its grammar; None: it has none, or it is being compiled
    why_unconstrained: tuple[ErrorCode, str] | None = None  # why there is none that could be enforced
    adapter: AdapterSource | None = None
    adapter_slot: int = -1  # that it holds; -1: its adapter is in none yet, or it has none
    why_unadapted: str = ""  # why its adapter cannot be had
    images: tuple[SequenceImage, ...] = ()  # of its prompt, in order
    second_from: int = 0  # of a pair of texts, where the second one begins; 0: it is one text
    num_prompt_tokens: int = field(init=False)
    counts: TokenCounts | None = field(init=False)  # None: penalties and biases are off
    may_be_masked: bool = field(init=False)  # there may be tokens that it must not choose
    length_limit: int = 0  # of all tokens: it ends when it has so many
    arrival: int = 0  # order of submission: the youngest is preempted first
    num_computed_tokens: int = 0
    num_completed_tokens: int = 0
    # how often it has lost its blocks, at its end as well, or was rewound: what was launched before is not its own any more
    epoch: int = 0
    # nobody can say yet how many tokens are being chosen, or in which row they could be fed
    awaits_tokens: bool = False
    share: int = 0  # of the pool, whose blocks it has: that of a rank, where ranks have sequences of their own
    tables: list[BlockTable] = field(default_factory=list)  # of each group of layers; none before it has blocks
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0  # in each table
    num_disk_blocks: int | None = None  # read for it from the disk tier; None: it was not asked
    num_store_blocks: int | None = None  # and from the store; None: it was not asked for them
    source: BlockSource | None = None  # to be asked for its blocks, once
    hands_over: bool = False  # another host fetches its blocks
    num_peer_blocks: int = 0  # that its source has brought, of all groups
    num_cached_tokens: int | None = None  # of the prompt, when it was first scheduled
    num_fetched_tokens: int = 0  # of these, those that its source has computed
    fetched_bytes_per_s: float = 0.0  # at which they came
    started: bool = False  # an output has been published
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    added_at: float = 0.0  # by the scheduler's clock
    queue_us: int = 0  # from then until it was first admitted
    device_us: float = 0.0  # its shares of steps, of which no output has told yet

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        self.may_be_masked = self.constraint is not None or self.sampling.min_tokens > 0
        self.counts = None
        if self.sampling.adjusts_logits:
            self.counts = TokenCounts(self.sampling, self.num_prompt_tokens - self.num_delivered_tokens)

    @property
    def lacks_grammar(self) -> bool:
        """Tell whether it may not go on for want of the grammar that it must follow."""
        if self.constraint is None or self.matcher is not None:
            return False
        return not self.constraint.is_optional or (self.why_unconstrained or ("",))[0] == "overloaded"

    @property
    def owner(self) -> tuple[int, bytes]:
        """The group that shares one part of the step's prompt tokens."""
        return self.priority, self.tenant

    @property
    def min_length(self) -> int:
        """The number of all its tokens before which it must not end."""
        return self.num_prompt_tokens - self.num_delivered_tokens + self.sampling.min_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_blocks(self) -> int:
        """The blocks that it holds, in all groups."""
        return sum([table.num_held for table in self.tables])

    @property
    def has_computed_prompt(self) -> bool:
        """Whether all of its prompt's blocks are in the cache, or were when it was last preempted."""
        return self.num_completed_tokens >= self.num_prompt_tokens or self.started

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest token is missing from the cache."""
        return self.num_computed_tokens > 0 and self.num_uncomputed_tokens == 1

    @property
    def is_pending(self) -> bool:
        """Whether its newest token is not known yet."""
        return self.token_ids[-1] == PENDING

    @property
    def num_ready_tokens(self) -> int:
        """The tokens that can be computed now: none before results are here that are not known yet."""
        num_tokens = len(self.token_ids)
        if self.awaits_tokens or (num_tokens >= self.length_limit and self.is_pending):
            return 0
        return num_tokens - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling.prompt_logprobs and not self.started

    @property
    def needs_every_token(self) -> bool:
        """Whether every token must be computed: what is reported of the prompt's tokens, or made of all their hidden states, is not in the cache."""
        return self.first_needed_token == 0

    @property
    def first_needed_token(self) -> int | None:
        """The first token that must be computed, though the cache may hold it; None if all but the last may come from the cache."""
        if self.pooling in ("mean", "cls"):
            return 0
        return self.sampling.prompt_logprobs_from - 1 if self.wants_prompt_logprobs else None

    def shares_prompt_with(self, other: "Sequence") -> bool:
        """Whether its prompt's blocks, once computed by the other, are this one's as well."""
        return (
            other is not self
            and other.chain_root == self.chain_root
            and other.token_ids[: other.num_prompt_tokens] == self.token_ids[: self.num_prompt_tokens]
            and other.images == self.images
            and not self.needs_every_token
        )

    def take_device_us(self) -> int:
        """Return what the next output is to tell of the device's time, in whole microseconds; the rest is told later."""
        told = int(self.device_us)
        self.device_us -= told
        return told

    def rewind(self, unit: int = 1) -> None:
        """Go back to what collected steps have computed, and of that to a multiple of `unit` tokens. The blocks stay: what lies in them after that is
        written again before it is read."""
        self._drop_pending()
        kept = self.num_completed_tokens // unit * unit
        if self.pooling is not None and kept < self.num_completed_tokens:
            kept = 0  # what is pooled of the tokens in between cannot be taken back
        first_reported = max(1, self.sampling.prompt_logprobs_from)
        del self.prompt_logprobs[max(0, kept + 1 - first_reported) :]
        self.num_computed_tokens = self.num_completed_tokens = kept
        self.epoch += 1

    def forget_computed(self) -> None:
        """Reset what is computed, after preemption. The tokens stay, but for one that is still to be chosen: it is chosen again."""
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
