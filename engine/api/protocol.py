"""The engine protocol: every message between a front end and an engine host.

Messages are frozen structs. Those that are sent alone have a tag; frames.py encodes them. Any release may add a field, with a default that means the
earlier behaviour, and increments VERSION's second number: an older receiver ignores the field, and an older sender leaves it at its default, which
therefore never changes. A change that must not be ignored increments the first number, and peers whose first numbers differ refuse each other. This
module is independent of sockets, processes, text and torch.
"""

from typing import Literal

from pilotlight.engine.api.struct import Struct, replace

VERSION = (3, 10)  # version of the protocol
PRIORITIES = range(-8, 9)

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
    "context_length_exceeded",  # the prompt, plus one token if text is generated, does not fit the context or the KV cache
    "invalid_request",  # a token id outside the vocabulary, an empty prompt, a duplicate sequence id, an image that cannot be read
    "images_missing",  # an image was sent without its data, and this host does not have it; the sender retries with data
    "overloaded",  # the waiting queue is full
    "request_failed",  # several steps failed, or hosts died, and only this sequence was part of all of them
    "engine_error",  # a step failed, logits were not finite, or the host died
]


class _Value(Struct, frozen=True, gc=False, omit_defaults=True):
    """The base of all messages.

    The garbage collector ignores messages, because they contain no cycles. Fields with default values are not sent: a frame of 64 sequences takes 2.5
    us to encode and 7 us to decode (measured).
    """


class SamplingParams(_Value, frozen=True):
    """The rules by which the next token is chosen.

    `temperature == 0` is greedy. The random number for a token depends only on (seed, position).
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0  # penalty of tokens in prompt or output (kernels/sampling/penalties.py); 1 for none
    presence_penalty: float = 0.0  # penalty of tokens in the output
    frequency_penalty: float = 0.0  # penalty of tokens in the output per occurrence
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number added to its logit); each token at most once
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    # Number of alternatives reported in addition to each chosen token's logprob; None for no logprobs.
    num_logprobs: int | None = None
    # Report the logprob of every prompt token except the first, even if it is cached: such tokens are computed again.
    prompt_logprobs: bool = False
    min_tokens: int = 0  # no end-of-sequence or stop token is chosen before this many tokens, including delivered ones
    num_prompt_logprobs: int | None = None  # alternatives for each prompt token; None for as many as num_logprobs
    # Index of the first prompt token whose logprob is reported. The prefix before it may come from the cache.
    prompt_logprobs_from: int = 1

    @property
    def adjusts_logits(self) -> bool:
        """True if penalties or a bias change logits before a token is chosen."""
        penalizes = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return penalizes or bool(self.logit_bias)


class Constraint(_Value, frozen=True):
    """The form that an answer must have.

    `kind` is the type of `text`: a JSON schema, a regular expression for the whole answer, a JSON array of strings of which the answer is one, or a
    grammar in llguidance's dialect of Lark.
    """

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str
    is_optional: bool = False  # True if the answer is generated without the constraint if that cannot be enforced


class ModelSpec(_Value, frozen=True):
    """A model to load: a local Hugging Face directory (config.json, *.safetensors)."""

    name: str
    path: str
    dtype: Dtype = "auto"
    # Size, in tokens, of a KV cache that is reserved for this model; None if the model borrows unused blocks of the arena.
    kv_tokens: int | None = None
    # Path of the bundle in shared memory, which the runtime owns and which outlives this host. It is mapped if it is whole and from exactly this
    # checkpoint, else written during the load. None if the weights are in the host's private memory.
    weights_file: str | None = None
    # True if a request waits for the load. On a CPU its prompt then replaces the warm-up prompt as the check that the model's results are finite.
    is_awaited: bool = False
    # Whether a CPU keeps bf16 matrices in 12 bits, with the same results: auto (if measured to be faster), off, or always.
    lossless: Lossless = "auto"
    # How tokens are drafted for speculative decoding: "off", "auto", or drafters in order of preference ("suffix,grammar").
    speculate: str = "off"
    # The type of the KV cache: that of the computation, or FP8 (e4m3), which takes half the bytes of bf16.
    kv_dtype: KvDtype = "auto"

    def loads_same(self, other: "ModelSpec") -> bool:
        """Return True if one load satisfies both specs."""
        return replace(self, is_awaited=other.is_awaited) == other


class HostConfig(_Value, frozen=True):
    """The configuration of an engine host. Sizes are in bytes unless the name has another unit."""

    device: str = "auto"  # "auto", "cpu", "cuda" or "cuda:N"
    threads: int | None = None  # intra-op threads of torch; None for torch's choice
    kv_bytes: int = 256 << 20  # size of the KV arena, which all models of the host share
    block_size: int = 16  # tokens in a KV block
    max_num_batched_tokens: int = 2048
    # Most time, by measured speed, by which the prompt tokens of a step may delay the sequences that decode in it. The default gives five tokens a
    # second, about as fast as people read. A step may always have one block of prompt tokens.
    max_decode_delay_ms: float = 200.0
    max_num_seqs: int = 64
    max_waiting: int = 1024
    # The KV tiers beyond the device. They outlive the host: the process that starts the host chooses their directories and removes them.
    kv_host_bytes: int = 0  # size of the host tier, which all models share; 0 for no tiers
    kv_host_dir: str | None = None  # a directory on a file system in memory
    kv_disk_bytes: int = 0
    kv_disk_dir: str | None = None  # None for no disk tier
    kv_disk_write_bytes_per_s: float = 0.0  # upper bound of the write rate; 0 for none
    kv_store: str | None = None  # HOST:PORT of the master of the cluster's Mooncake Store; None for no store
    # Address (ipc://PATH, tcp://HOST:PORT) at which this host serves blocks of its host tier to other hosts. None if it neither serves nor fetches.
    peer_address: str | None = None
    # How blocks are transferred: by "shared_memory" on one machine and the socket of peer_address between machines, or by "mooncake".
    peer_transport: PeerTransport = "shared_memory"
    peer_keys: str | None = (
        None  # key file (pilotlight.engine.api.keys) that all hosts share; None if the hosts share a machine
    )
    # Devices of all ranks that share each model: this process has the first, its children or Ray the others. Sizes are per rank. Empty for one rank.
    group: tuple[str, ...] = ()
    # Address of the Ray cluster that runs the ranks "ray:cpu" and "ray:cuda" of a group.
    ray_address: str = "auto"
    stages: int = 1  # number of pipeline stages into which the ranks are divided, in order
    expert_parallel: bool = False  # each rank of a stage has some whole experts of a layer, instead of a part of each
    redundant_experts: int = 0  # number of copies of each layer's busiest experts, over all ranks of a stage
    data_parallel: int = 1  # number of copies of attention in a stage, each with separate sequences
    adapter_slots: int = 16  # slots on the device, per model: the number of adapters that one step may use
    adapter_host_bytes: int = 1 << 30  # host memory, per model, for adapters in the layout of the slots
    # Planned bytes of weights, on one rank, of the models that may be loaded; 0 for an unknown model. The KV cache of a CUDA device gets the memory
    # that they leave. If empty, kv_bytes is its size.
    model_bytes: tuple[int, ...] = ()

    @property
    def far_ranks(self) -> tuple[int, ...]:
        """The numbers of the ranks that Ray runs, which may be on other machines."""
        return tuple([rank for rank, device in enumerate(self.group) if device.startswith("ray:")])

    @property
    def near_ranks(self) -> tuple[int, ...]:
        """The numbers of the ranks on this machine: this process and its children."""
        return tuple([rank for rank, device in enumerate(self.group) if not device.startswith("ray:")])


# Front end -> host


class BlockSource(_Value, frozen=True):
    """Another host, which computes the same prompt and hands over its KV blocks."""

    address: str  # the address at which that host serves its blocks (HostConfig.peer_address)
    hand_over: str  # id of that host's sequence
    within_s: float  # time limit, after which this host computes the missing blocks


class AdapterSource(_Value, frozen=True):
    """An adapter of the model: a directory in PEFT's format."""

    name: str  # name for error messages
    path: str
    digest: str  # digest of its files (engine/adapters/peft.py), part of the names of cached blocks


class PromptImage(_Value, frozen=True):
    """An image, and the run of prompt tokens that represents it (engine/text/image_prompt.py).

    Each placeholder within the run is replaced by the image's next embedding; other tokens in the run separate tiles.
    """

    position: int  # index of the run's first placeholder in the prompt
    num_tokens: int  # number of tokens from the first to the last placeholder
    digest: bytes  # sha256 of the file
    data: bytes = b""  # the file; empty if this host is expected to have it
    # Embeddings per row, for a model that rotates them by row and column; 0 for other models.
    columns: int = 0
    # True if the image's tokens attend to each other in both directions. Since version 3.10.
    is_bidirectional: bool = False


class Submit(_Value, frozen=True, tag=True):
    """Start a sequence.

    A continuation is a Submit whose prompt ends with the tokens already delivered, so that positions, and thus random numbers, stay the same.
    """

    sequence_id: str  # unique during the life of the host, because outputs of an aborted sequence may still arrive
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: bytes = b""  # the tenant's salt, from which the hash chains of the prefix cache start; admission is fair between tenants
    # For a continuation, the number of tokens at the prompt's end that are earlier output, for penalties and min_tokens. `sampling.max_tokens` does
    # not include them.
    num_delivered_tokens: int = 0
    # The id of an earlier sequence with the same prompt and salt. If it is still computing the prompt, this sequence waits and uses its cached
    # blocks. The id is ignored if that sequence has ended or has another prompt.
    leader: str | None = None
    # Lower priorities are admitted first, but no sequence starves (engine/scheduling/fairness.py has the bound). Only admission is affected: running
    # sequences are preempted by age.
    priority: int = 0
    # How to compute the prompt's embedding or the logits of its classes, instead of generating text; `sampling` is then ignored.
    pooling: Pooling | None = None
    constraint: Constraint | None = None
    # The host from which to fetch the prompt's KV blocks before admission; blocks that it does not deliver are computed here.
    fetch_from: BlockSource | None = None
    hands_over: bool = False  # True if another host fetches the prompt's blocks from here, under this sequence's id
    adapter: AdapterSource | None = None  # None for the plain model
    images: tuple[PromptImage, ...] = ()  # in the order of their positions
    # True if a host died while it computed this sequence, which then runs alone until its prompt is computed.
    is_suspect: bool = False
    second_from: int = (
        0  # index of the second text's first token in a pair; 0 for one text, or if the model does not distinguish them
    )
    # Seconds that the request has waited already, at hosts or sites that are lost. The sequence is as old as one that was submitted then. Since
    # version 3.9.
    waited_s: float = 0.0


class Abort(_Value, frozen=True, tag=True):
    sequence_id: str


class LoadModel(_Value, frozen=True, tag=True):
    spec: ModelSpec


class PrewarmModel(_Value, frozen=True, tag=True):
    """Prepare for a model that may have to be loaded here, at low priority.

    A CUDA host loads the model's kernels, and registers the memory of its sleeping weights. There is no answer. Since version 3.5.
    """

    spec: ModelSpec


class UnloadModel(_Value, frozen=True, tag=True):
    name: str


class Hello(_Value, frozen=True, tag=True):
    """The first command of a front end.

    The answer is HostReady, as soon as the host can load a model, or FrontEndRefused.
    """

    version: tuple[int, int]  # the sender's protocol version; Hello and HostReady have this field in all versions
    # Seconds of silence after which the host aborts the sequences; until then it accepts no other front end. None if any other front end may take
    # over at once.
    lease_s: float | None = None


class KeepAlive(_Value, frozen=True, tag=True):
    """Renew the lease of a front end that has nothing else to send."""


class Shutdown(_Value, frozen=True, tag=True):
    """End the host."""


Command = Submit | Abort | LoadModel | PrewarmModel | UnloadModel | Hello | KeepAlive | Shutdown


# Host -> front end


class TokenLogprobs(_Value, frozen=True):
    """Natural logarithms of the model's probabilities, before bias, penalties, temperature and truncation."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    rank: int | None = None  # 1 for the most likely token; only for prompt tokens


class TokenOutput(_Value, frozen=True):
    """The new tokens of one sequence in one step.

    The first output of a sequence has `num_cached_tokens`; the last has a finish reason.
    """

    sequence_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token of `token_ids`
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # one per prompt token after the first
    # The embedding or the logits of the model's classes, in the only output of a sequence with pooling.
    embedding: tuple[float, ...] | None = None
    error_code: ErrorCode | None = None  # set with finish_reason "error"
    error_message: str | None = None
    num_fetched_tokens: int = 0  # number of cached tokens that another host computed for this sequence
    num_drafted: int = 0  # number of draft tokens that this step verified
    num_accepted: int = 0  # number of draft tokens that were accepted into `token_ids`
    # The sequence's share of the device's time since its last output; the sum over all outputs is the device's busy time.
    device_us: int = 0
    queue_us: int = 0  # time from submission to the first step, in microseconds; only in the first output


class DraftCounts(_Value, frozen=True):
    """Counters of draft tokens since the model was loaded."""

    num_drafts: int = 0  # verifications of a sequence's draft tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # Accepted tokens that were the first, second, ... draft token of a sequence in a step.
    accepted_per_position: tuple[int, ...] = ()
    num_failures: int = 0  # number of times that a drafter was disabled for a sequence

    def with_chunk(self, num_drafted: int, num_accepted: int) -> "DraftCounts":
        """Return the counts after one more verification of a sequence's draft tokens."""
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
    """Counters of damaged KV blocks of all models of a host, by the tier that had the block."""

    host: int = 0
    disk: int = 0
    store: int = 0
    peer: int = 0  # received from another host


NONE_CORRUPT = CorruptBlocks()


class ModelLoad(_Value, frozen=True):
    """The present load of one model. Counters count since the model was loaded."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens not computed yet, of waiting and prefilling sequences
    free_blocks: int = 0  # blocks that new sequences could take: free, evictable, or available from other models
    total_blocks: int = 0  # free and held blocks; fewer than in ModelInfo while other models use the arena
    prefix_queries: int = 0  # prompt tokens looked up (counter)
    prefix_hits: int = 0  # prompt tokens found in a cache (counter)
    prefix_host_hits: int = 0  # prefix hits in the host tier (counter)
    prefix_disk_hits: int = 0  # prefix hits in the disk tier (counter)
    prefix_store_hits: int = 0  # prefix hits in the cluster's store (counter)
    prefix_peer_hits: int = 0  # prefix hits that were fetched from another host (counter)
    preemptions: int = 0  # counter
    swaps: int = 0  # preemptions that kept the blocks in the host tier (counter)
    tier_losses: int = 0  # chains of which a needed block was lost or damaged in a tier (counter)
    prompt_tokens: int = 0  # computed prompt tokens (counter)
    output_tokens: int = 0  # generated tokens (counter)
    prefill_tokens_per_s: float = 0.0  # a moving average; 0 if not measured yet
    decode_tokens_per_s: float = 0.0  # decoding speed of one sequence, a moving average; 0 if not measured yet
    handed_over_tokens_per_s: float = (
        0.0  # rate at which other hosts fetch tokens' blocks, a moving average; 0 if not measured yet
    )
    pinned_blocks: int = 0  # blocks of the host tier, of all models, that are in use or reserved for waiting sequences
    store: str = ""  # random name of the connected KV store; "" if no store is connected
    store_tokens_per_s: float = 0.0  # rate at which tokens' blocks are read from the store; 0 if not measured yet
    drafts: DraftCounts = NO_DRAFTS
    adapter_loads: int = 0  # adapters put into slots (counter)
    image_encodes: int = 0  # images that were encoded (counter)
    image_hits: int = 0  # needed images whose embeddings were cached (counter)
    num_graphs: int = 0  # recordings of steps, each for one size: CUDA graphs, or programs on a CPU
    # Failed recordings; steps of such a size are launched operation by operation (counter).
    graph_failures: int = 0
    corrupt_blocks: CorruptBlocks = NONE_CORRUPT


class ModelInfo(_Value, frozen=True):
    """The properties of a loaded model."""

    name: str
    context_length: int  # most tokens of a sequence: the model's limit, or fewer if the KV cache is smaller
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    block_size: int
    total_blocks: int  # most KV blocks that the model could have
    weights_bytes: int
    load_s: float
    # The pooling of an embedding or scoring model; None for a model that generates text.
    pooling: Pooling | None = None
    embedding_size: int = 0  # size of a text's vector
    saved_bytes: int = 0  # bytes saved by matrices in 12 bits
    mapped: bool = False  # True if the weights came from a whole bundle, without reading the checkpoint
    load_phases: tuple[tuple[str, float], ...] = ()  # (name, seconds) of the phases of the load, in order
    image_token_id: int | None = None  # token that image embeddings replace; None if images are not supported
    kv_block_bytes: int = 0  # bytes of one block of the KV cache, summed over ranks; 0 without a cache
    text_prompt: str = ""  # default prefix of texts for an embedding model
    stored_dtypes: tuple[str, ...] = ()  # types of the checkpoint's tensors, by safetensors' names; empty if unknown
    prompts: tuple[tuple[str, str], ...] = ()  # (name, prefix) of prefixes that a request may choose
    labels: tuple[str, ...] = ()  # labels of the classes whose logits are a text's vector; empty for an embedding
    activation: Activation = "none"  # function that converts the logits of `labels` to scores
    answers_by_token: bool = (
        False  # True if the model's only class is the answer yes to a question that its chat template asks
    )


class HostPhases(_Value, frozen=True):
    """The phases of a step's time on the host."""

    schedule_ms: float = 0.0  # choice of sequences and blocks
    prepare_ms: float = 0.0  # transfer of the batch to the device, and launch of the model
    publish_ms: float = 0.0  # conversion of results to messages, without their encoding

    @property
    def total_ms(self) -> float:
        return self.schedule_ms + self.prepare_ms + self.publish_ms


NO_TIME = HostPhases()


class StepOutput(_Value, frozen=True, tag=True):
    """The result of a step: the new tokens of every sequence, and the load of every model.

    An idle host sends it without tokens, as a heartbeat.
    """

    step: int
    outputs: tuple[TokenOutput, ...]
    loads: dict[str, ModelLoad]
    host_time_ms: float = 0.0  # the step's time on the host: the sum of the phases
    device_time_ms: float = 0.0
    phases: HostPhases = NO_TIME


class HostReady(_Value, frozen=True, tag=True):
    """The host has done the preparations that need no model: imports, kernel library, device context."""

    version: tuple[int, int]
    phases: tuple[tuple[str, float], ...] = ()  # (name, seconds) of these preparations, in order
    weights_bytes: int | None = (
        None  # a CUDA device's memory for weights of models; None on a CPU, which uses the machine's memory
    )
    fallbacks: tuple[str, ...] = ()  # sentences about functions that are slower than the machine would allow


class FrontEndRefused(_Value, frozen=True, tag=True):
    """The host refuses this front end: its version differs, or another front end uses the host."""

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
    """The last event of a host that ends.

    Its unfinished work is lost, as if the host had been killed.
    """

    reason: str
    failed_under: tuple[str, ...] = ()  # the sequences in the step whose failure ends the host


Event = StepOutput | HostReady | FrontEndRefused | LoadProgress | ModelReady | ModelFailed | ModelUnloaded | HostEnding
