"""Validation of submitted sequences against the vocabulary, context and task of their model.

A problem is returned as a sentence with the value and its limits. Dialects and site files check the values that do not depend on the model.
"""

from pilotlight.engine.api.protocol import ErrorCode, ModelInfo, SamplingParams, Submit


def refusal(submit: Submit, model: ModelInfo) -> tuple[ErrorCode, str] | None:
    prompt, sampling = submit.prompt_token_ids, submit.sampling
    if not prompt:
        return "invalid_request", "the prompt is empty; send at least one token"
    if min(prompt) < 0 or max(prompt) >= model.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < model.vocab_size)
        return "invalid_request", f"token id {wrong} is outside the vocabulary of {model.vocab_size} tokens"
    if submit.images and model.image_token_id is None:
        return "invalid_request", f"{model.name} takes no images; send text alone"
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


def _sampling_problem(sampling: SamplingParams, vocab_size: int) -> str | None:
    if any(not 0 <= token_id < vocab_size for token_id in sampling.stop_token_ids) and sampling.min_tokens:
        return f"stop_token_ids names a token outside the vocabulary of {vocab_size} tokens"
    for name in ("num_logprobs", "num_prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and count > vocab_size:
            return f"{name} is {count}; it must be from 0 to {vocab_size}"
    for token_id, _ in sampling.logit_bias:
        if token_id >= vocab_size:
            return f"logit_bias names token id {token_id}, outside the vocabulary of {vocab_size} tokens"
    return None
