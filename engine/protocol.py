"""The engine protocol: every message between a front end and an engine host, and its byte form.

Messages are frozen msgspec structs in one tagged union per direction; one ZeroMQ frame holds one msgpack message. The module knows shapes
and names; it refuses to know sockets, processes, text or torch, so that a runtime process can import it for free.
"""

from typing import Literal

import msgspec

Dtype = Literal["auto", "float32", "bfloat16"]
FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal[
    "model_not_found",  # the host holds no model of that name
    "model_load_failed",  # the checkpoint is missing, truncated, misshapen or unsupported
    "context_length_exceeded",  # the prompt, or prompt + 1 token, does not fit the model's context or the KV cache
    "invalid_request",  # a token id outside the vocabulary, an empty prompt, a duplicate sequence id
    "overloaded",  # the waiting queue is full
    "engine_error",  # a step failed, logits were not finite, or the host died
]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. `temperature == 0` is greedy. The random number of a token is a function of (seed, position) alone."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = (
        None  # alternatives reported beside each chosen token's own logprob; None: report nothing
    )
    prompt_logprobs: bool = (
        False  # report the logprob of every prompt token but the first (prefix hits are then recomputed)
    )


class ModelSpec(msgspec.Struct, frozen=True):
    """A model to load: a local Hugging Face directory (config.json, *.safetensors)."""

    name: str
    path: str
    dtype: Dtype = "auto"
    kv_tokens: int | None = None  # KV cache size in tokens; None: an even share of what the host's arena has left


class HostConfig(msgspec.Struct, frozen=True):
    """What an engine host is started with. Sizes are bytes unless the name says otherwise."""

    device: str = "cpu"
    threads: int | None = None  # intra-op threads of torch; None: torch's choice
    kv_bytes: int = 256 << 20  # one arena for all models of the host
    block_size: int = 16  # tokens in a KV block
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_waiting: int = 1024
    deterministic: bool = False  # every reduction independent of its neighbours in the batch


# Front end -> host


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start a sequence. A continuation is a Submit whose prompt ends in the tokens already delivered: positions, hence random numbers, agree."""

    sequence_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: bytes = b""  # tenant salt: seeds the prefix cache's hash chain


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    sequence_id: str


class LoadModel(msgspec.Struct, frozen=True, tag="load_model"):
    spec: ModelSpec


class UnloadModel(msgspec.Struct, frozen=True, tag="unload_model"):
    name: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    pass


Command = Submit | Abort | LoadModel | UnloadModel | Shutdown


# Host -> front end


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities before temperature and truncation, as the field reports them."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's new tokens of one step. The first output of a sequence carries `num_cached_tokens`; the last carries a finish reason."""

    sequence_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token of `token_ids`
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # one per prompt token after the first
    error_code: ErrorCode | None = None  # with finish_reason "error"
    error_message: str | None = None


class ModelLoad(msgspec.Struct, frozen=True):
    """How busy one model is now."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0  # prompt tokens not yet computed, over waiting and prefilling sequences
    free_blocks: int = 0  # free or evictable: what a new sequence could take
    total_blocks: int = 0
    prefix_queries: int = 0  # prompt tokens looked up since load (counter)
    prefix_hits: int = 0  # prompt tokens found cached since load (counter)
    prompt_tokens: int = 0  # computed since load (counter)
    output_tokens: int = 0  # produced since load (counter)
    prefill_tokens_per_s: float = 0.0  # moving averages of measured steps; 0: not measured yet
    decode_tokens_per_s: float = 0.0  # per sequence


class ModelInfo(msgspec.Struct, frozen=True):
    """What a loaded model can do."""

    name: str
    context_length: int  # tokens, the smaller of the model's and the KV cache's
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    block_size: int
    total_blocks: int
    weights_bytes: int
    load_s: float


class StepOutput(msgspec.Struct, frozen=True, tag="step"):
    """One frame per step: every sequence's new tokens, and the load of every model. Also sent, without tokens, as a heartbeat when idle."""

    step: int
    outputs: tuple[TokenOutput, ...]
    loads: dict[str, ModelLoad]
    host_time_ms: float = 0.0  # schedule + prepare + publish of this step
    device_time_ms: float = 0.0


class LoadProgress(msgspec.Struct, frozen=True, tag="load_progress"):
    name: str
    done_bytes: int
    total_bytes: int


class ModelReady(msgspec.Struct, frozen=True, tag="model_ready"):
    info: ModelInfo


class ModelFailed(msgspec.Struct, frozen=True, tag="model_failed"):
    name: str
    error_code: ErrorCode
    message: str


class ModelUnloaded(msgspec.Struct, frozen=True, tag="model_unloaded"):
    name: str


Event = StepOutput | LoadProgress | ModelReady | ModelFailed | ModelUnloaded

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    return _command_decoder.decode(frame)


def decode_event(frame: bytes) -> Event:
    return _event_decoder.decode(frame)
