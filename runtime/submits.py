"""What a request submits to the engine: a sequence for each choice that is not whole yet, and what reads each choice's outputs.

Refuses to know permits, hosts and who waits for the answer.
"""

import os

from msgspec.structs import replace

from dialects.requests import ValidGeneration
from engine.protocol import AdapterSource, SamplingParams, Submit
from runtime.answer_form import AnswerForm
from runtime.engines.model_state import AwakeModel
from runtime.output_processor import OutputProcessor
from runtime.prompts import EncodedPrompt
from runtime.resumption import Submits, resumed
from wire.credentials import Tenant


async def as_submits(
    model: AwakeModel,
    request: ValidGeneration,
    prompts: list[EncodedPrompt],
    params: list[SamplingParams],
    tenant: Tenant,
    adapter: AdapterSource | None,
) -> tuple[Submits, list[OutputProcessor]]:
    """Return the sequences, by choice, and the processors of all choices. A prompt's choice i draws with seed + i, so its first is what a request for
    one choice would get; the others wait for that to compute the prompt. Raises ApiError, and DivergedError for what cannot be continued."""
    answer = AnswerForm(model, request, prompts[0].token_ids)
    constraint = answer.constraint()
    submits: Submits = {}
    for prompt, sampling in zip(prompts, params, strict=True):
        sequence_id = os.urandom(16).hex()
        first = Submit(
            sequence_id,
            request.model,
            prompt.token_ids,
            sampling,
            tenant.salt,
            constraint=constraint,
            adapter=adapter,
            images=prompt.images,
        )
        submits[len(submits)] = first
        for i in range(1, request.n):
            submits[len(submits)] = replace(
                first,
                sequence_id=os.urandom(16).hex(),
                sampling=replace(sampling, seed=(sampling.seed + i) % 2**63, prompt_logprobs=False),
                leader=first.sequence_id,
            )
    if request.delivery.choices:
        return await resumed(request, submits, answer.processor)
    return submits, [answer.processor() for _ in submits]


def sampling_params(model: AwakeModel, request: ValidGeneration, prompt_tokens: int) -> SamplingParams:
    """The request's wishes, the checkpoint's recommendations where it has none, and never more tokens than the context leaves."""
    sampling, defaults = request.sampling, model.text.defaults
    room = model.info.context_length - prompt_tokens
    top_k = defaults.top_k if sampling.top_k is None else sampling.top_k
    max_tokens = model.config.default_max_tokens or room if sampling.max_tokens is None else sampling.max_tokens
    return SamplingParams(
        max_tokens=min(room, max(1, max_tokens)),  # for the prompt alone, too: a token ends its computation
        temperature=defaults.temperature if sampling.temperature is None else sampling.temperature,
        top_k=top_k if top_k is not None and top_k > 0 else None,
        top_p=defaults.top_p if sampling.top_p is None else sampling.top_p,
        min_p=defaults.min_p if sampling.min_p is None else sampling.min_p,
        seed=request.answer_name.seed if sampling.seed is None else sampling.seed,
        repetition_penalty=(
            defaults.repetition_penalty if sampling.repetition_penalty is None else sampling.repetition_penalty
        ),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        num_logprobs=sampling.num_logprobs,
        prompt_logprobs=request.num_prompt_alternatives is not None,
        num_prompt_logprobs=request.num_prompt_alternatives,
    )
