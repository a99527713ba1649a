"""The engine's door: why a configuration or a submitted sequence cannot work, in a sentence with its numbers.

Everything behind it relies on the opposite.
"""

import math

from engine.protocol import ErrorCode, HostConfig, ModelInfo, SamplingParams, Submit


def host_problem(config: HostConfig) -> str | None:
    for name in ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_waiting", "num_models"):
        value = getattr(config, name)
        if value < 1:
            return f"{name} is {value}; it must be at least 1"
    if config.kv_bytes < 0:
        return f"kv_bytes is {config.kv_bytes}; it must be 0 or more"
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
    problem = _sampling_problem(sampling, model.vocab_size)
    if problem:
        return "invalid_request", problem
    if len(prompt) >= model.context_length:
        return (
            "context_length_exceeded",
            f"the prompt has {len(prompt)} tokens; {model.name} holds {model.context_length} tokens, "
            f"so a prompt may have at most {model.context_length - 1}",
        )
    return None


def _sampling_problem(sampling: SamplingParams, vocab_size: int) -> str | None:
    if sampling.max_tokens < 1:
        return f"max_tokens is {sampling.max_tokens}; it must be at least 1"
    if not 0.0 <= sampling.temperature < math.inf:
        return f"temperature is {sampling.temperature}; it must be 0 or a positive number"
    if sampling.top_k is not None and sampling.top_k < 1:
        return f"top_k is {sampling.top_k}; it must be at least 1"
    if not 0.0 < sampling.top_p <= 1.0:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if not 0.0 <= sampling.min_p <= 1.0:
        return f"min_p is {sampling.min_p}; it must be from 0 to 1"
    if sampling.num_logprobs is not None and not 0 <= sampling.num_logprobs <= vocab_size:
        return f"num_logprobs is {sampling.num_logprobs}; it must be from 0 to {vocab_size}"
    return None
