"""Validation of configurations and submitted sequences; later code relies on valid values.

A problem is returned as a sentence with the value and its limits.
"""

import math

from pilotlight.engine.api.protocol import PRIORITIES, ErrorCode, HostConfig, ModelInfo, SamplingParams, Submit


def host_problem(config: HostConfig) -> str | None:
    for name in ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_waiting", "adapter_slots"):
        value = getattr(config, name)
        if value < 1:
            return f"{name} is {value}; it must be at least 1"
    for name in ("max_decode_delay_ms", "kv_bytes", "kv_host_bytes", "kv_disk_bytes", "kv_disk_write_bytes_per_s"):
        value = getattr(config, name)
        if value < 0:
            return f"{name} is {value}; it must be 0 or more"
    if config.kv_host_bytes and config.kv_host_dir is None:
        return f"kv_host_bytes is {config.kv_host_bytes}, but kv_host_dir is missing"
    if config.kv_disk_dir is not None and not config.kv_host_bytes:
        return "kv_disk_dir is set, but blocks reach the disk through the host tier: set kv_host_bytes as well"
    if config.kv_store is not None and not config.kv_host_bytes:
        return "kv_store is set, but blocks reach the store through the host tier: set kv_host_bytes as well"
    if config.peer_address is not None and not config.kv_host_bytes:
        return "peer_address is set, but blocks reach other hosts through the host tier: set kv_host_bytes as well"
    if config.threads is not None and config.threads < 1:
        return f"threads is {config.threads}; it must be at least 1"
    return None


def refusal(submit: Submit, model: ModelInfo) -> tuple[ErrorCode, str] | None:
    prompt, sampling = submit.prompt_token_ids, submit.sampling
    if not prompt:
        return "invalid_request", "the prompt is empty; send at least one token"
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < model.vocab_size)
        return "invalid_request", f"token id {wrong} is outside the vocabulary of {model.vocab_size} tokens"
    if not 0 <= submit.num_delivered_tokens < len(prompt):
        return (
            "invalid_request",
            f"num_delivered_tokens is {submit.num_delivered_tokens}; it must be at least 0 and less than the prompt's length",
        )
    if submit.images and (problem := _image_problem(submit, model)):
        return "invalid_request", problem
    if submit.priority not in PRIORITIES:
        return (
            "invalid_request",
            f"priority is {submit.priority}; it must be from {PRIORITIES[0]} (first) to {PRIORITIES[-1]} (last)",
        )
    problem = _sampling_problem(sampling, model.vocab_size)
    if problem:
        return "invalid_request", problem
    if (submit.pooling is None) != (model.pooling is None):
        return "invalid_request", _wrong_kind(model)
    if submit.pooling is not None:
        return _text_refusal(submit, model)
    if len(prompt) >= model.context_length:
        return (
            "context_length_exceeded",
            f"the prompt has {len(prompt)} tokens; {model.name} holds {model.context_length} tokens, "
            f"so a prompt may have at most {model.context_length - 1}",
        )
    return None


def _wrong_kind(model: ModelInfo) -> str:
    if model.pooling is None:
        return f"{model.name} is a model that generates text; it makes no embeddings or scores"
    if model.labels:
        return f"{model.name} is a model that scores texts; it cannot generate text"
    return f"{model.name} is an embedding model; it cannot generate text"


def _text_refusal(submit: Submit, model: ModelInfo) -> tuple[ErrorCode, str] | None:
    """Return why a text is refused, or None. A text may fill the context, because no token follows it."""
    tokens = len(submit.prompt_token_ids)
    if not 0 <= submit.second_from < tokens:
        return "invalid_request", f"second_from is {submit.second_from}; it must be from 0 to {tokens - 1}"
    if model.labels and submit.pooling != model.pooling:
        return "invalid_request", f"{model.name} scores classes by the pooling {model.pooling}, not {submit.pooling}"
    if tokens <= model.context_length:
        return None
    return "context_length_exceeded", f"the text has {tokens} tokens; {model.name} takes at most {model.context_length}"


def _image_problem(submit: Submit, model: ModelInfo) -> str | None:
    if model.image_token_id is None:
        return f"{model.name} takes no images; send text alone"
    end = 0
    for image in submit.images:
        if len(image.digest) != 32:
            return f"an image's digest has {len(image.digest)} bytes; a sha256 has 32"
        if not end <= image.position < len(submit.prompt_token_ids) or image.num_tokens < 1:
            return f"an image's tokens are {image.num_tokens} from {image.position} on; they must be in the prompt, after those of the previous image"
        if image.columns < 0 or (image.columns and image.num_tokens % image.columns):
            return f"an image has {image.num_tokens} tokens in rows of {image.columns}; rows must be whole"
        end = image.position + image.num_tokens
        if image.is_bidirectional and end > len(submit.prompt_token_ids):
            return f"an image's tokens, which attend to each other, end at {end}; all of them must be in the prompt"
    return None


def _sampling_problem(sampling: SamplingParams, vocab_size: int) -> str | None:
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}; it must be at least 1"
    if sampling.prompt_logprobs_from < 1:
        return f"prompt_logprobs_from is {sampling.prompt_logprobs_from}; nothing comes before the first token, so it must be at least 1"
    if sampling.min_tokens < 0:
        return f"min_tokens is {sampling.min_tokens}; it must be 0 or more"
    if any(not 0 <= token_id < vocab_size for token_id in sampling.stop_token_ids) and sampling.min_tokens:
        return f"stop_token_ids names a token outside the vocabulary of {vocab_size} tokens"
    if not 0.0 <= sampling.temperature < math.inf:
        return f"temperature is {sampling.temperature}; it must be 0 or a positive number"
    if sampling.top_k is not None and sampling.top_k < 1:
        return f"top_k is {sampling.top_k}; it must be at least 1"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if not 0.0 <= sampling.min_p <= 1.0:
        return f"min_p is {sampling.min_p}; it must be from 0 to 1"
    for name in ("num_logprobs", "num_prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and not 0 <= count <= vocab_size:
            return f"{name} is {count}; it must be from 0 to {vocab_size}"
    return _penalty_problem(sampling) or _bias_problem(sampling, vocab_size)


def _penalty_problem(sampling: SamplingParams) -> str | None:
    # Bounds that keep logits finite, which a factor of 1e-30 would not.
    if not 0.01 <= sampling.repetition_penalty <= 100.0:
        return f"repetition_penalty is {sampling.repetition_penalty}; it must be from 0.01 to 100"
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= getattr(sampling, name) <= 2.0:
            return f"{name} is {getattr(sampling, name)}; it must be from -2 to 2"
    return None


def _bias_problem(sampling: SamplingParams, vocab_size: int) -> str | None:
    biases = sampling.logit_bias
    if len({token_id for token_id, _ in biases}) < len(biases):
        return "logit_bias names a token twice"
    for token_id, bias in biases:
        if not 0 <= token_id < vocab_size:
            return f"logit_bias names token id {token_id}, outside the vocabulary of {vocab_size} tokens"
        if not -100.0 <= bias <= 100.0:
            return f"logit_bias of token {token_id} is {bias}; it must be from -100 to 100"
    return None
