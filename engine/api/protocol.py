"""The engine protocol: every message between a front end and an engine host.

Messages are frozen structs; those that are sent alone carry a tag, and frames.py has their byte form. A field may be added in any release, with a
default that means the earlier behaviour: an older receiver ignores it, and an older sender leaves it at its default, which therefore never changes.
That increments VERSION's second number; a change that must not be ignored increments the first, and peers whose first numbers differ refuse each
other. Does not know sockets, processes, text and torch.
"""

from typing import Literal

from pilotlight.engine.api.struct import Struct, replace

VERSION = (3, 8)  # of the protocol
PRIORITIES = range(-8, 9)
# last part of a prompt that is handed over, at most: the transfer of its blocks overlaps with no computation
LAST_CHUNK_TOKENS = 512

Dtype = Literal["auto", "float32", "bfloat16"]
Lossless = Literal["auto", "off", "always"]
KvDtype = Literal["auto", "fp8"]
FinishReason = Literal["stop", "length", "abort", "error"]
PeerTransport = Literal["shared_memory", "mooncake"]
Pooling = Literal["mean", "last", "cls"]
Activation = Literal["none", "sigmoid", "softmax"]
ErrorCode = Literal[
    "model_not_found",  # the host has no model of that name
    "model_load_failed",  # the checkpoint is missing, truncated, misshapen or unsupported
    "context_length_exceeded",  # the prompt, or prompt + 1 token, does not fit the model's context or the KV cache
    "invalid_request",  # a token id outside the vocabulary, an empty prompt, a duplicate sequence id, an image that cannot be read
    "images_missing",  # an image was sent without its data, and this host does not have it: send it once more with data
    "overloaded",  # the waiting queue is full
    "request_failed",  # steps fail, or hosts die, with only this sequence in common
    "engine_error",  # a step failed, logits were not finite, or the host died
]


class _Value(Struct, frozen=True, gc=False, omit_defaults=True):
    """The base of all messages.

    The garbage collector ignores messages, since they contain no cycles; fields that equal their default are not sent (measured, a frame of 64
    sequences: 2.5 us to encode and 7 to decode).
    """


class SamplingParams(_Value, frozen=True):
    """The rules by which the next token is chosen.

    `temperature == 0` is greedy. The random number of a token is a function of (seed, position) alone.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0  # for tokens in prompt or output; 1: off. Defined in kernels/sampling/penalties.py
    presence_penalty: float = 0.0  # for tokens in the output
    frequency_penalty: float = 0.0  # for tokens in the output, once per occurrence
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit); no token twice
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # alternatives reported beside each chosen token's own logprob; None reports none
    num_logprobs: int | None = None
    # report the logprob of every prompt token but the first (prefix hits are then recomputed)
    prompt_logprobs: bool = False
    min_tokens: int = 0  # below this number no end-of-sequence or stop token is chosen, delivered ones included
    num_prompt_logprobs: int | None = None  # alternatives beside each prompt token; None for num_logprobs
    # the first prompt token whose logprob is reported, if the first ones are not needed: a prefix hit may end before it
    prompt_logprobs_from: int = 1

    @property
    def adjusts_logits(self) -> bool:
        """True if some logits are changed before the choice, greedy or not."""
        penalizes = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalizes or bool(self.logit_bias)


class Constraint(_Value, frozen=True):
    """The form that an answer must have.

    It is a document allowed by a JSON schema, a text that a regular expression matches as a whole, one of the strings in a JSON array, or a sentence
    of a grammar in Lark's notation, as llguidance reads it.
    """

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    is_optional: bool = False  # if it cannot be enforced, the answer continues without it


class ModelSpec(_Value, frozen=True):
    """A model to load: a local Hugging Face directory (config.json, *.safetensors)."""

    name: str
    path: str
    dtype: Dtype = "auto"
    # KV cache in tokens that only this model uses, no more and no less; None if it borrows unused blocks of the arena
    kv_tokens: int | None = None
    # One flat file in memory, owned by the runtime, that outlives this host: mapped if it is whole and of exactly this checkpoint, else written
    # during the load. None if the weights are in the host's own memory
    weights_file: str | None = None
    # A request waits for its first token. On a CPU its prompt then shows that the model's results are finite, instead of a warm-up prompt
    is_awaited: bool = False
    # Whether a CPU keeps bf16 matrices in 12 bits, with the same results: auto (if measured to be faster), never, or always
    lossless: Lossless = "auto"
    # How tokens are drafted for steps to verify: "off", "auto", or drafters in order of preference ("suffix,grammar")
    speculate: str = "off"
    # How the KV cache stores numbers: as the model computes, or in FP8 (e4m3), in half the bytes of bf16
    kv_dtype: KvDtype = "auto"

    def loads_same(self, other: "ModelSpec") -> bool:
        """True if one load satisfies both."""
        return replace(self, is_awaited=other.is_awaited) == other


class HostConfig(_Value, frozen=True):
    """The configuration of an engine host. Sizes are in bytes unless the name has another unit."""

    device: str = "auto"  # "auto", "cpu", "cuda" or "cuda:N"
    threads: int | None = None  # intra-op threads of torch; None for torch's choice
    kv_bytes: int = 256 << 20  # one arena for all models of the host
    block_size: int = 16  # tokens in a KV block
    max_num_batched_tokens: int = 2048
    # By how much a step's prompt tokens may delay the sequences that decode in it, by measured speed: five tokens a second are about as fast as
    # people read. A step has at least a block of prompt tokens
    max_decode_delay_ms: float = 200.0
    max_num_seqs: int = 64
    max_waiting: int = 1024
    # The tiers after the device. They outlive the host: its starter chooses their places and removes them.
    kv_host_bytes: int = 0  # shared memory for all models; 0 for no tiers
    kv_host_dir: str | None = None  # on a file system in memory
    kv_disk_bytes: int = 0
    kv_disk_dir: str | None = None  # None for no disk tier
    kv_disk_write_bytes_per_s: float = 0.0  # upper bound; 0 for as fast as the disk allows
    kv_store: str | None = None  # HOST:PORT of the master of the cluster's Mooncake Store; None for no store
    # Address at which this host serves its host tier's blocks to others (ipc://PATH, tcp://HOST:PORT), and may fetch their blocks; None for neither
    peer_address: str | None = None
    # The same for other sites' hosts (tcp://HOST:PORT), over the socket only: requires peer_keys; None if they are not served
    lend_address: str | None = None
    # How blocks are transferred here: "shared_memory" on one machine and the same socket between machines, or "mooncake"
    peer_transport: PeerTransport = "shared_memory"
    peer_keys: str | None = (
        None  # a file of pilotlight.engine.api.keys, the same for all hosts; None if they share a machine
    )
    # Devices of all ranks that share each model, this process's first; the others are its children. Sizes are per rank. Empty: no other ranks
    group: tuple[str, ...] = ()
    # address of the Ray cluster that runs the ranks "ray:cpu" and "ray:cuda" of a group
    ray_address: str = "auto"
    stages: int = 1  # number of pipeline stages into which the ranks are divided, in order: each has consecutive layers
    expert_parallel: bool = False  # each rank of a stage has some of a layer's experts, instead of a part of each
    redundant_experts: int = 0  # copies of each layer's busiest experts, over all ranks of a stage
    data_parallel: int = 1  # copies of the attention in a stage, each with separate sequences
    adapter_slots: int = 16  # per model, on the device: adapters that sequences of one step may have
    adapter_host_bytes: int = 1 << 30  # per model: adapters kept in host memory in the layout of the slots
    # Planned weights of the models that may be loaded, on one rank; 0 for an unknown one. A CUDA device's KV cache is the memory that they leave.
    # Empty: kv_bytes is the size
    model_bytes: tuple[int, ...] = ()

    @property
    def far_ranks(self) -> tuple[int, ...]:
        """Return the ranks on other machines."""
        return tuple([rank for rank, device in enumerate(self.group) if device.startswith("ray:")])

    @property
    def near_ranks(self) -> tuple[int, ...]:
        """Return the ranks on this machine: the first one, and its children."""
        return tuple([rank for rank, device in enumerate(self.group) if not device.startswith("ray:")])


# Front end -> host


class BlockSource(_Value, frozen=True):
    """Another host that computes the same prompt and hands its KV blocks over."""

    address: str  # address at which that host serves the blocks (HostConfig.peer_address)
    hand_over: str  # the sequence's id there
    within_s: float  # this host then computes missing blocks
    is_lent: bool = False  # the host belongs to another site: its blocks come over the socket only


class AdapterSource(_Value, frozen=True):
    """An adapter of the model: a directory in PEFT's format."""

    name: str  # in messages
    path: str
    digest: str  # of its files (engine/adapters/peft.py): cached blocks were computed with exactly these


class PromptImage(_Value, frozen=True):
    """An image, and the run of prompt tokens that represents it (engine/text/image_prompt.py).

    Each placeholder within the run represents the image's next embedding; other tokens there separate tiles.
    """

    position: int  # of the run's first placeholder
    num_tokens: int  # number of tokens from its first to its last one
    digest: bytes  # the file; empty if this host is expected to have it
    data: bytes = b""  # the file; b"": this host is believed to have it
    # Embeddings in a row, of a model that rotates them by row and column; 0 for others
    columns: int = 0


class Submit(_Value, frozen=True, tag=True):
    """Start a sequence.

    A continuation is a Submit whose prompt ends in the tokens already delivered: positions, hence random numbers, agree.
    """

    sequence_id: str  # unique for the life of the host: outputs of an aborted sequence may still be on their way
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: bytes = b""  # tenant salt: seeds the prefix cache's hash chain; tenants share admission fairly
    # of a continuation, how many of the prompt's last tokens are its earlier output: penalties count them as such. `sampling.max_tokens` counts from
    # here: the sender has subtracted delivered tokens.
    num_delivered_tokens: int = 0
    # an earlier sequence of the same prompt and salt, if it is still computing that prompt: this one waits, then uses its cache. A hint: any other
    # name is ignored
    leader: str | None = None
    # smaller is admitted sooner, strictly, but no priority starves (engine/scheduling/fairness.py has the bound). It affects only admission: started
    # sequences are preempted by age
    priority: int = 0
    # compute the prompt's vector, in this way, instead of continuing it: its embedding, or its classes' logits; `sampling` is then ignored
    pooling: Pooling | None = None
    constraint: Constraint | None = None
    # fetch the prompt's KV blocks from there before admission. A hint: missing blocks are computed here
    fetch_from: BlockSource | None = None
    hands_over: bool = False  # another host fetches the prompt's blocks from here, under this sequence's id
    adapter: AdapterSource | None = None  # None for the plain model
    images: tuple[PromptImage, ...] = ()  # in the order of their positions
    is_suspect: bool = False  # a host died while it computed this sequence: its steps stay separate until it has computed its present tokens
    second_from: int = (
        0  # where the second text of a pair starts; 0 for one text, or if the model does not distinguish them
    )


class Abort(_Value, frozen=True, tag=True):
    sequence_id: str


class LoadModel(_Value, frozen=True, tag=True):
    spec: ModelSpec


class PrewarmModel(_Value, frozen=True, tag=True):
    """Prepare, at low priority, for a model that may have to be loaded here.

    Prepares its kernels, and the memory of its sleeping weights. Has no answer; from version 3.5 on.
    """

    spec: ModelSpec


class UnloadModel(_Value, frozen=True, tag=True):
    name: str


class Hello(_Value, frozen=True, tag=True):
    """The first command of a front end.

    Answered by HostReady, as soon as the host could load a model, or by FrontEndRefused.
    """

    version: tuple[int, int]  # of the protocol; this field, here and in HostReady, exists in all versions
    # Seconds of silence after which the host ends the sequences; until then it accepts no other front end. None if any front end that greets it takes
    # over
    lease_s: float | None = None


class KeepAlive(_Value, frozen=True, tag=True):
    """Renew the lease of a front end that has nothing else to send."""


class Shutdown(_Value, frozen=True, tag=True):
    """End the front end and its host."""


Command = Submit | Abort | LoadModel | PrewarmModel | UnloadModel | Hello | KeepAlive | Shutdown


# Host -> front end


class TokenLogprobs(_Value, frozen=True):
    """Natural-log probabilities of the model itself, before bias, penalties, temperature and truncation."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    rank: int | None = None  # 1 for the likeliest token; only for prompt tokens


class TokenOutput(_Value, frozen=True):
    """One sequence's new tokens of one step.

    The first output of a sequence carries `num_cached_tokens`; the last carries a finish reason.
    """

    sequence_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token of `token_ids`
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # one per prompt token after the first
    # the only output of a sequence with pooling: the embedding, or the logits of the model's classes
    embedding: tuple[float, ...] | None = None
    error_code: ErrorCode | None = None  # with finish_reason "error"
    error_message: str | None = None
    num_fetched_tokens: int = 0  # of num_cached_tokens, those that another host computed for this sequence
    fetched_bytes_per_s: float = 0.0  # rate at which that host's blocks arrive, as measured here; 0 if unknown
    num_drafted: int = 0  # drafts that this step has verified
    num_accepted: int = 0  # of these, tokens of `token_ids`
    # its shares of the steps since its last output; the sum over all outputs is the device's total busy time
    device_us: int = 0
    queue_us: int = 0  # with the first output: from submission until its first admission to a step


class DraftCounts(_Value, frozen=True):
    """Counts of drafts since the model's load, and of accepted ones."""

    num_drafts: int = 0  # times that drafts of a sequence were verified
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # of these, those that were the first, second, ... draft of a sequence in a step
    accepted_per_position: tuple[int, ...] = ()
    num_failures: int = 0  # drafters that were disabled for a sequence

    def with_chunk(self, num_drafted: int, num_accepted: int) -> "DraftCounts":
        """Return the counts after one more verification of a sequence's drafts."""
        positions = list(self.accepted_per_position) + [0] * (num_drafted - len(self.accepted_per_position))
        for position in range(num_accepted):
            positions[position] += 1
        return DraftCounts(
            self.num_drafts + 1,
            self.num_draft_tokens + num_drafted,
            self.num_accepted_tokens + num_accepted,
            tuple(positions),
            self.num_failures,
        )

    def with_failure(self) -> "DraftCounts":
        """Return the counts after one more drafter was disabled for a sequence."""
        return replace(self, num_failures=self.num_failures + 1)


NO_DRAFTS = DraftCounts()


class CorruptBlocks(_Value, frozen=True):
    """KV blocks that were found damaged, by the tier that had them, of all models of a host (counters)."""

    host: int = 0
    disk: int = 0
    store: int = 0
    peer: int = 0  # another host


NONE_CORRUPT = CorruptBlocks()


class ModelLoad(_Value, frozen=True):
    """The present load of one model."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens not yet computed, over waiting and prefilling sequences
    free_blocks: int = 0  # blocks that a new sequence could take: free, evictable, or available from other models
    total_blocks: int = 0  # these and the held ones; fewer than ModelInfo's while other models use the arena
    prefix_queries: int = 0  # prompt tokens looked up since load (counter)
    prefix_hits: int = 0  # prompt tokens found cached since load (counter)
    prefix_host_hits: int = 0  # of these hits, in the host tier (counter)
    prefix_disk_hits: int = 0  # of these hits, in the disk tier (counter)
    prefix_store_hits: int = 0  # of these hits, in the cluster's store (counter)
    prefix_peer_hits: int = 0  # of these hits, fetched from another host (counter)
    preemptions: int = 0  # since load (counter)
    swaps: int = 0  # of these, with the blocks kept in the host tier (counter)
    tier_losses: int = 0  # chains that a tier had lost or damaged when they were needed (counter)
    prompt_tokens: int = 0  # computed since load (counter)
    output_tokens: int = 0  # produced since load (counter)
    prefill_tokens_per_s: float = 0.0  # moving averages of measured steps; 0 if not measured yet
    decode_tokens_per_s: float = 0.0  # per sequence
    handed_over_tokens_per_s: float = (
        0.0  # rate of blocks that other hosts fetch; a moving average, 0 if not measured yet
    )
    pinned_blocks: int = 0  # blocks of the host tier, of all models, kept for readers and waiters
    store: str = ""  # the name of its KV store among the store's members; "" if none is connected
    store_tokens_per_s: float = 0.0  # rate of blocks read from the store; 0 if not measured yet
    drafts: DraftCounts = NO_DRAFTS
    adapter_loads: int = 0  # adapters put into slots since load (counter)
    image_encodes: int = 0  # images that the encoder has computed since load (counter)
    image_hits: int = 0  # images that were needed and already encoded since load (counter)
    num_graphs: int = 0  # recorded sizes of steps, each replayed by one launch
    # failed attempts to record one since load: such steps are launched one operation after another (counter)
    graph_failures: int = 0
    corrupt_blocks: CorruptBlocks = NONE_CORRUPT


class ModelInfo(_Value, frozen=True):
    """The properties of a loaded model."""

    name: str
    context_length: int  # tokens, the smaller of the model's and of the largest KV cache that it could have
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    block_size: int
    total_blocks: int  # blocks that it could have at most
    weights_bytes: int
    load_s: float
    # of a model of whole texts, for the vector it was made for; None for a model that generates
    pooling: Pooling | None = None
    embedding_size: int = 0  # numbers of a text's vector
    saved_bytes: int = 0  # bytes saved by matrices in 12 bits
    mapped: bool = False  # the weights came from a whole bundle: the checkpoint was not read
    load_phases: tuple[tuple[str, float], ...] = ()  # (name, seconds) of the load, in order
    image_token_id: int | None = None  # represents an image's embeddings in prompts; None if the model takes no images
    kv_block_bytes: int = 0  # bytes of one block of the KV cache, summed over ranks; 0 if it caches nothing
    # per group of layers, the number of tokens that a query sees; None for all before it
    kv_windows: tuple[int | None, ...] = ()
    text_prompt: str = ""  # prefix of every text for an embedding model
    stored_dtypes: tuple[str, ...] = ()  # types of the checkpoint's tensors, by safetensors' names; empty if unknown
    prompts: tuple[tuple[str, str], ...] = ()  # prefixes that a request may choose instead of text_prompt, by name
    labels: tuple[str, ...] = ()  # of the classes whose logits a text's vector contains; empty for an embedding
    activation: Activation = "none"  # function from those logits to scores
    answers_by_token: bool = (
        False  # its single class is the likelihood of the answer yes, for which its chat template asks
    )


class HostPhases(_Value, frozen=True):
    """The parts of a step's time on the host."""

    schedule_ms: float = 0.0  # choice of sequences and blocks
    prepare_ms: float = 0.0  # until the batch is on the device and the model is launched
    publish_ms: float = 0.0  # from results to messages; encoding comes later

    @property
    def total_ms(self) -> float:
        return self.schedule_ms + self.prepare_ms + self.publish_ms


NO_TIME = HostPhases()


class StepOutput(_Value, frozen=True, tag=True):
    """One frame per step: every sequence's new tokens, and the load of every model.

    Also sent, without tokens, as a heartbeat when idle.
    """

    step: int
    outputs: tuple[TokenOutput, ...]
    loads: dict[str, ModelLoad]
    host_time_ms: float = 0.0  # of this step, without the device's: the sum of the phases
    device_time_ms: float = 0.0
    phases: HostPhases = NO_TIME


class HostReady(_Value, frozen=True, tag=True):
    """The host has done all that needs no model: imports, the kernels' library, the device's context."""

    version: tuple[int, int]
    phases: tuple[tuple[str, float], ...] = ()  # (name, seconds) of this preparation, in order
    weights_bytes: int | None = (
        None  # memory of a CUDA device for models' weights; None on a CPU, which uses the machine's
    )
    fallbacks: tuple[str, ...] = ()  # functions that it computes more slowly than its machine could, one sentence each


class FrontEndRefused(_Value, frozen=True, tag=True):
    """The host does not, or no longer, obey this front end: its version differs, or another one has it."""

    reason: str


class LoadProgress(_Value, frozen=True, tag=True):
    name: str
    done_bytes: int
    total_bytes: int
    waits_for: str = ""  # what the load is waiting for


class ModelReady(_Value, frozen=True, tag=True):
    info: ModelInfo


class ModelFailed(_Value, frozen=True, tag=True):
    name: str
    error_code: ErrorCode
    message: str


class ModelUnloaded(_Value, frozen=True, tag=True):
    name: str


class HostEnding(_Value, frozen=True, tag=True):
    """The last event: the host was asked to end, and computes nothing more.

    Its unfinished work is lost, as if it had been killed.
    """

    reason: str
    failed_under: tuple[str, ...] = ()  # the sequences in the step whose failure ends it


Event = StepOutput | HostReady | FrontEndRefused | LoadProgress | ModelReady | ModelFailed | ModelUnloaded | HostEnding
