"""The engine protocol: every message between a front end and an engine host.

Messages are frozen structs; those that travel alone carry a tag, and their byte form is frames.py. A field may be added in any release, with a
default that means what was so before: who does not know it leaves it unread, and who is not told it takes the default, which therefore never
changes. That raises VERSION's second number; whatever may not be left unread raises its first, and peers whose first numbers differ refuse each
other. The module refuses to know sockets, processes, text and torch.
"""

from typing import Literal

from pilotlight.engine.api.struct import Struct, replace

VERSION = (3, 8)  # of the protocol
PRIORITIES = range(-8, 9)
LAST_CHUNK_TOKENS = 512  # of a prompt that is handed over, at most: its blocks are the ones that no computing hides

Dtype = Literal["auto", "float32", "bfloat16"]
Lossless = Literal["auto", "off", "always"]
KvDtype = Literal["auto", "fp8"]
FinishReason = Literal["stop", "length", "abort", "error"]
PeerTransport = Literal["shared_memory", "mooncake"]
Pooling = Literal["mean", "last", "cls"]
Activation = Literal["none", "sigmoid", "softmax"]
ErrorCode = Literal[
    "model_not_found",  # the host holds no model of that name
    "model_load_failed",  # the checkpoint is missing, truncated, misshapen or unsupported
    "context_length_exceeded",  # the prompt, or prompt + 1 token, does not fit the model's context or the KV cache
    "invalid_request",  # a token id outside the vocabulary, an empty prompt, a duplicate sequence id, an image that cannot be read
    "images_missing",  # an image was sent without its data, and this host does not have it: send it once more with data
    "overloaded",  # the waiting queue is full
    "request_failed",  # steps fail, or hosts die, with this sequence alone
    "engine_error",  # a step failed, logits were not finite, or the host died
]


class _Value(Struct, frozen=True, gc=False, omit_defaults=True):
    """What messages are made of. Left to itself by the garbage collector, since none leads back to itself; of its fields those are sent that are
    no defaults (measured, a frame of 64 sequences: 2.5 us to encode and 7 to decode)."""


class SamplingParams(_Value, frozen=True):
    """How the next token is chosen. `temperature == 0` is greedy. The random number of a token is a function of (seed, position) alone."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0  # of tokens in prompt or output; 1: off. Defined in kernels/sampling/penalties.py
    presence_penalty: float = 0.0  # of tokens in the output
    frequency_penalty: float = 0.0  # of tokens in the output, once for each time
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit); no token twice
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # alternatives reported beside each chosen token's own logprob; None: report nothing
    num_logprobs: int | None = None
    # report the logprob of every prompt token but the first (prefix hits are then recomputed)
    prompt_logprobs: bool = False
    min_tokens: int = 0  # before which no end-of-sequence or stop token is chosen, delivered ones counted
    num_prompt_logprobs: int | None = None  # alternatives beside each of them; None: as many as num_logprobs says
    # the first prompt token whose logprob is reported, where the first ones are of no interest: a prefix hit may end before it
    prompt_logprobs_from: int = 1

    @property
    def adjusts_logits(self) -> bool:
        """Some logits are changed before the choice, greedy or not."""
        penalizes = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalizes or bool(self.logit_bias)


class Constraint(_Value, frozen=True):
    """What an answer must be: a document that a JSON schema allows, a text that a regular expression matches as a whole, one of the strings in a JSON
    array, or a sentence of a grammar in Lark's notation, as llguidance reads it."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    is_optional: bool = False  # where it cannot be enforced, the answer goes on without it


class ModelSpec(_Value, frozen=True):
    """A model to load: a local Hugging Face directory (config.json, *.safetensors)."""

    name: str
    path: str
    dtype: Dtype = "auto"
    # KV cache in tokens that is this model's alone, no more and no less; None: it borrows from the arena what others leave
    kv_tokens: int | None = None
    # One flat file in memory, of the runtime's, that outlives this host: mapped where it is whole and of exactly this
    # checkpoint, else written on the way. None: weights in the host's own memory
    weights_file: str | None = None
    # Somebody waits for its first token. On a CPU their prompt then proves that the model computes numbers, in place of a prompt of ours before it
    is_awaited: bool = False
    # Whether a CPU keeps bf16 matrices in 12 bits, with the same results: where it measures that to be faster, never, or always
    lossless: Lossless = "auto"
    # How tokens are guessed that steps then check: "off", "auto", or drafters in the order in which they are asked ("suffix,grammar")
    speculate: str = "off"
    # How the KV cache keeps numbers: as the model computes, or in FP8 (e4m3), in half the bytes of bf16
    kv_dtype: KvDtype = "auto"

    def loads_same(self, other: "ModelSpec") -> bool:
        """Return whether one load answers both."""
        return replace(self, is_awaited=other.is_awaited) == other


class HostConfig(_Value, frozen=True):
    """What an engine host is started with. Sizes are bytes unless the name says otherwise."""

    device: str = "auto"  # "auto", "cpu", "cuda" or "cuda:N"
    threads: int | None = None  # intra-op threads of torch; None: torch's choice
    kv_bytes: int = 256 << 20  # one arena for all models of the host
    block_size: int = 16  # tokens in a KV block
    max_num_batched_tokens: int = 2048
    # By which a step's prompt tokens may hold up the sequences that decode beside them, by measured speed: five tokens a second are about as fast as
    # people read. A step has a block of prompt tokens at least
    max_decode_delay_ms: float = 200.0
    max_num_seqs: int = 64
    max_waiting: int = 1024
    # The tiers behind the device. They outlive the host: its starter says where they lie, and removes them.
    kv_host_bytes: int = 0  # of shared memory for all models; 0: no tiers
    kv_host_dir: str | None = None  # on a file system in memory
    kv_disk_bytes: int = 0
    kv_disk_dir: str | None = None  # None: no disk tier
    kv_disk_write_bytes_per_s: float = 0.0  # at most; 0: as fast as the disk takes them
    kv_store: str | None = None  # HOST:PORT of the master of the cluster's Mooncake Store; None: no store
    # Where this host serves the blocks of its host tier to others (ipc://PATH, tcp://HOST:PORT), and fetches theirs if it is told to. None: neither
    peer_address: str | None = None
    # And to other sites' hosts (tcp://HOST:PORT), over the socket alone: peer_keys is given then. None: to none
    lend_address: str | None = None
    # How blocks come here: "shared_memory" where both are on one machine and over the same socket elsewhere, or "mooncake"
    peer_transport: PeerTransport = "shared_memory"
    peer_keys: str | None = (
        None  # a file of pilotlight.engine.api.keys, the same at all of them; None: they are on one machine
    )
    # Devices of all ranks that share each model, this process' first; the others are its children. Sizes are each rank's own. Empty: it is alone
    group: tuple[str, ...] = ()
    # of the cluster on whose machines the ranks "ray:cpu" and "ray:cuda" of a group are placed
    ray_address: str = "auto"
    stages: int = 1  # into which these ranks are divided, in their order: each has a run of the layers
    expert_parallel: bool = False  # of a layer's experts each rank of a stage has some, instead of a part of each
    redundant_experts: int = 0  # copies of each layer's busiest experts, on the ranks of a stage together
    data_parallel: int = 1  # copies of the attention in a stage, each with sequences of its own
    adapter_slots: int = 16  # of each model, on the device: adapters that sequences of one step may have
    adapter_host_bytes: int = 1 << 30  # of each model's adapters, kept in host memory as they go into the slots
    # Planned weights of the models that may be loaded, on one rank; 0 where one's are not known yet. A CUDA device's KV cache is what they leave.
    # Empty: kv_bytes says
    model_bytes: tuple[int, ...] = ()

    @property
    def far_ranks(self) -> tuple[int, ...]:
        """The ranks on other machines."""
        return tuple([rank for rank, device in enumerate(self.group) if device.startswith("ray:")])

    @property
    def near_ranks(self) -> tuple[int, ...]:
        """The ranks on this machine: the first one, and its children."""
        return tuple([rank for rank, device in enumerate(self.group) if not device.startswith("ray:")])


# Front end -> host


class BlockSource(_Value, frozen=True):
    """Another host, which computes the same prompt and hands its KV blocks over."""

    address: str  # where it serves them (HostConfig.peer_address)
    hand_over: str  # the sequence there
    within_s: float  # after which this host computes what has not come
    is_lent: bool = False  # by another site: its blocks come over the socket alone


class AdapterSource(_Value, frozen=True):
    """An adapter of the model: a directory as PEFT writes it."""

    name: str  # in messages
    path: str
    digest: str  # of its files (engine/adapters/peft.py): what is cached under it was computed with these


class PromptImage(_Value, frozen=True):
    """An image, and the run of a prompt's tokens that stand for it (engine/text/image_prompt.py). Within the run each placeholder's embedding is the
    image's next one; other tokens there separate tiles."""

    position: int  # of the run's first placeholder
    num_tokens: int  # from there to its last one
    digest: bytes  # sha256 of the file
    data: bytes = b""  # the file; b"": this host is believed to have it


class Submit(_Value, frozen=True, tag=True):
    """Start a sequence. A continuation is a Submit whose prompt ends in the tokens already delivered: positions, hence random numbers, agree."""

    sequence_id: str  # unique for the life of the host: outputs of an aborted sequence may still be on their way
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: bytes = b""  # tenant salt: seeds the prefix cache's hash chain; tenants share admission fairly
    # of a continuation, how many of the prompt's last tokens are its earlier output: penalties count them as such.
    # `sampling.max_tokens` counts from here: what was delivered, whoever continues has taken off.
    num_delivered_tokens: int = 0
    # an earlier sequence of the same prompt and salt, if it is still computing that prompt: this one waits, then finds it
    # cached. A hint: of anything else named here nobody takes notice
    leader: str | None = None
    # smaller is admitted sooner, strictly, but no priority starves (engine/scheduling/fairness.py says the bound). It decides about
    # admission alone: what has started is preempted by age
    priority: int = 0
    # make the prompt's vector, in this way, instead of continuing it: its embedding, or its classes' logits; of `sampling` nothing then counts
    pooling: Pooling | None = None
    constraint: Constraint | None = None
    # fetch the prompt's KV blocks from there before it is admitted. A hint: what does not come is computed here
    fetch_from: BlockSource | None = None
    hands_over: bool = False  # another host fetches the prompt's blocks from here, under this sequence's id
    adapter: AdapterSource | None = None  # None: the model as it is
    images: tuple[PromptImage, ...] = ()  # in the order of their positions
    is_suspect: bool = (
        False  # a host died under it: its steps are apart from the others' until it has computed the tokens that it has
    )
    second_from: int = (
        0  # of a pair of texts, where the second one begins; 0: it is one text, or its model does not tell them apart
    )


class Abort(_Value, frozen=True, tag=True):
    sequence_id: str


class LoadModel(_Value, frozen=True, tag=True):
    spec: ModelSpec


class PrewarmModel(_Value, frozen=True, tag=True):
    """Make ready, at low priority, for a model that may have to be loaded here: its kernels, and where its weights sleep. Unanswered; from version
    3.5 on."""

    spec: ModelSpec


class UnloadModel(_Value, frozen=True, tag=True):
    name: str


class Hello(_Value, frozen=True, tag=True):
    """The first command of a front end. Answered by HostReady, as soon as the host could load a model, or by FrontEndRefused."""

    version: tuple[int, int]  # of the protocol; that it is there, and HostReady's, holds in all versions
    # Of silence, after which the host ends the sequences; until then it takes no other front end. None: whoever greets it takes over
    lease_s: float | None = None


class KeepAlive(_Value, frozen=True, tag=True):
    """A front end that holds a lease is there, and has nothing else to say."""


class Shutdown(_Value, frozen=True, tag=True):
    """The front end goes, and the host with it."""


Command = Submit | Abort | LoadModel | PrewarmModel | UnloadModel | Hello | KeepAlive | Shutdown


# Host -> front end


class TokenLogprobs(_Value, frozen=True):
    """Natural-log probabilities of the model itself: before bias, penalties, temperature and truncation, as the field reports them."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    rank: int | None = None  # 1 for the likeliest token; counted for prompt tokens alone


class TokenOutput(_Value, frozen=True):
    """One sequence's new tokens of one step. The first output of a sequence carries `num_cached_tokens`; the last carries a finish reason."""

    sequence_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token of `token_ids`
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # one per prompt token after the first
    # of a sequence that was submitted with a pooling, its one output: the embedding, or the logits of the model's classes
    embedding: tuple[float, ...] | None = None
    error_code: ErrorCode | None = None  # with finish_reason "error"
    error_message: str | None = None
    num_fetched_tokens: int = 0  # of num_cached_tokens, those that another host has computed for this sequence
    fetched_bytes_per_s: float = 0.0  # at which that host's blocks come here, as it measures; 0: not yet
    num_drafted: int = 0  # drafts that this step has checked
    num_accepted: int = 0  # of these, tokens of `token_ids`
    # its shares of the steps since its output before: together all of the time that the device was at work
    device_us: int = 0
    queue_us: int = 0  # with the first output: from its submission until it was first admitted to a step


class DraftCounts(_Value, frozen=True):
    """Counts of drafts since the model's load, and of what came of them."""

    num_drafts: int = 0  # times that drafts of a sequence were checked
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # of these, those that were a sequence's first, second, ... draft of a step
    accepted_per_position: tuple[int, ...] = ()
    num_failures: int = 0  # drafters that were given up for a sequence

    def with_chunk(self, num_drafted: int, num_accepted: int) -> "DraftCounts":
        """Return the counts after so many more drafts of a sequence."""
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
        """Return the counts after one more drafter was given up for a sequence."""
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
    """How busy one model is now."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens not yet computed, over waiting and prefilling sequences
    free_blocks: int = 0  # what a new sequence could take: free, evictable, or to be had from other models
    total_blocks: int = 0  # these and the held ones; less than ModelInfo's while other models are at work
    prefix_queries: int = 0  # prompt tokens looked up since load (counter)
    prefix_hits: int = 0  # prompt tokens found cached since load (counter)
    prefix_host_hits: int = 0  # of these, in the host tier behind the device (counter)
    prefix_disk_hits: int = 0  # and in the disk tier behind that (counter)
    prefix_store_hits: int = 0  # and in the store of the cluster (counter)
    prefix_peer_hits: int = 0  # and fetched from another host (counter)
    preemptions: int = 0  # since load (counter)
    swaps: int = 0  # of these, with the blocks kept in the host tier (counter)
    tier_losses: int = 0  # chains that a tier had lost or damaged when they were wanted (counter)
    prompt_tokens: int = 0  # computed since load (counter)
    output_tokens: int = 0  # produced since load (counter)
    prefill_tokens_per_s: float = 0.0  # moving averages of measured steps; 0: not measured yet
    decode_tokens_per_s: float = 0.0  # per sequence
    handed_over_tokens_per_s: float = 0.0  # of blocks that other hosts fetch; a moving average, 0: not measured yet
    pinned_blocks: int = 0  # of the host tier, of all models, that are kept for who reads or waits
    store: str = ""  # the name that the members of its KV store know that by; "": none answers
    store_tokens_per_s: float = 0.0  # of blocks that are read from there; 0: not measured yet
    drafts: DraftCounts = NO_DRAFTS
    adapter_loads: int = 0  # adapters put into slots since load (counter)
    image_encodes: int = 0  # images that the encoder has computed since load (counter)
    image_hits: int = 0  # images that were wanted and found encoded since load (counter)
    num_graphs: int = 0  # sizes of steps that are recorded, each replayed by one launch
    graph_failures: int = 0  # attempts to record one that failed since load: such steps are launched one operation after another (counter)
    corrupt_blocks: CorruptBlocks = NONE_CORRUPT


class ModelInfo(_Value, frozen=True):
    """What a loaded model can do."""

    name: str
    context_length: int  # tokens, the smaller of the model's and of all KV cache that it could ever have
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    block_size: int
    total_blocks: int  # that it could ever have
    weights_bytes: int
    load_s: float
    pooling: Pooling | None = None  # a model of whole texts, made for this one; None: a model that generates
    embedding_size: int = 0  # numbers of a text's vector
    saved_bytes: int = 0  # that matrices in 12 bits take less than plain ones
    mapped: bool = False  # the weights came from a whole bundle: the checkpoint was not read
    load_phases: tuple[tuple[str, float], ...] = ()  # (name, seconds) of the load, in order
    image_token_id: int | None = None  # that stands for an image's embeddings in prompts; None: it takes no images
    kv_block_bytes: int = 0  # of one block of the KV cache, all ranks' parts of it; 0: it caches nothing
    # of each group of layers, the tokens that a query sees; None: all before it
    kv_windows: tuple[int | None, ...] = ()
    text_prompt: str = ""  # that every text of an embedding model begins with
    stored_dtypes: tuple[str, ...] = ()  # of the checkpoint's tensors, by safetensors' names; empty: not known
    prompts: tuple[tuple[str, str], ...] = ()  # that a request may choose in place of text_prompt, by name
    labels: tuple[str, ...] = ()  # of the classes whose logits a text's vector holds; empty: it is an embedding
    activation: Activation = "none"  # from those logits to scores
    answers_by_token: bool = (
        False  # its one class is how likely it is to say yes, which it is asked by its chat template
    )


class HostPhases(_Value, frozen=True):
    """What the host's time of a step went into."""

    schedule_ms: float = 0.0  # who computes what, in which blocks
    prepare_ms: float = 0.0  # the batch as tensors, until the model is launched
    publish_ms: float = 0.0  # results counted and written into messages; their encoding comes later

    @property
    def total_ms(self) -> float:
        return self.schedule_ms + self.prepare_ms + self.publish_ms


NO_TIME = HostPhases()


class StepOutput(_Value, frozen=True, tag=True):
    """One frame per step: every sequence's new tokens, and the load of every model. Also sent, without tokens, as a heartbeat when idle."""

    step: int
    outputs: tuple[TokenOutput, ...]
    loads: dict[str, ModelLoad]
    host_time_ms: float = 0.0  # of this step, all but the device's: the sum of the phases
    device_time_ms: float = 0.0
    phases: HostPhases = NO_TIME


class HostReady(_Value, frozen=True, tag=True):
    """What needs no model has been done: imports, the kernels' library, the device's context."""

    version: tuple[int, int]
    phases: tuple[tuple[str, float], ...] = ()  # (name, seconds) of it, in order
    weights_bytes: int | None = None  # that models' weights may take of a CUDA device; None: a CPU has the machine's
    fallbacks: tuple[str, ...] = ()  # what it computes more slowly than its machine could, a sentence each


class FrontEndRefused(_Value, frozen=True, tag=True):
    """The host obeys this front end not, or no longer: it speaks another version, or another front end has the host."""

    reason: str


class LoadProgress(_Value, frozen=True, tag=True):
    name: str
    done_bytes: int
    total_bytes: int
    waits_for: str = ""  # what the load cannot go on without


class ModelReady(_Value, frozen=True, tag=True):
    info: ModelInfo


class ModelFailed(_Value, frozen=True, tag=True):
    name: str
    error_code: ErrorCode
    message: str


class ModelUnloaded(_Value, frozen=True, tag=True):
    name: str


class HostEnding(_Value, frozen=True, tag=True):
    """The last event: the host was told to end, and computes nothing more. What it has not finished is as if it had been killed."""

    reason: str
    failed_under: tuple[str, ...] = ()  # the sequences in the step for whose failure it ends


Event = StepOutput | HostReady | FrontEndRefused | LoadProgress | ModelReady | ModelFailed | ModelUnloaded | HostEnding
