"""Continues another site's answer: prepares its remaining sequences, and restores its processors.

The prompt is rendered again, followed by the delivered tokens, so that positions, counts and random numbers continue. A finished choice is not
computed again. Independent of how the delivered tokens arrived (wire/hop/continuation.py) and why the stream was cut.
"""

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from pilotlight.dialects.requests import ValidGeneration
from pilotlight.engine.api.protocol import Submit
from pilotlight.runtime.dispatch.sequences import remaining
from pilotlight.runtime.generation.output_processor import DivergedError, OutputProcessor

INLINE_TOKENS = 1_000  # up to so many tokens are replayed in the event loop, in a few ms; more are replayed in a thread

Submits = dict[int, Submit]  # choice -> sequence to submit


async def resumed(
    request: ValidGeneration, submits: Submits, new_processor: Callable[[], OutputProcessor]
) -> tuple[Submits, list[OutputProcessor]]:
    """Return the remaining sequences to submit, and processors in the other site's state.

    `submits` are the sequences without delivered tokens.
    """
    if sum(len(delivered.token_ids) for delivered in request.delivery.choices) <= INLINE_TOKENS:
        return _resumed(request, submits, new_processor)
    return await asyncio.to_thread(_resumed, request, submits, new_processor)


def _resumed(
    request: ValidGeneration, submits: Submits, new_processor: Callable[[], OutputProcessor]
) -> tuple[Submits, list[OutputProcessor]]:
    left: Submits = {}
    processors: list[OutputProcessor] = []
    for choice, submit in submits.items():
        delivered = request.delivered(choice)
        processor = new_processor()
        if delivered.finish_reason is not None:
            processor.end_with(delivered.token_ids, delivered.finish_reason)
        elif delivered.token_ids:
            wants_logprobs = submit.sampling.num_logprobs is not None
            num_kept = processor.resume(delivered.token_ids) if wants_logprobs else len(delivered.token_ids)
            kept, again = delivered.token_ids[:num_kept], delivered.token_ids[num_kept:]
            processor = new_processor()
            processor.resume(kept, again)
            if len(kept) >= (most := submit.sampling.max_tokens):
                raise DivergedError(f"{len(kept)} tokens of it were delivered, and here it may have {most}")
            left[choice] = remaining(submit, kept)
        else:
            left[choice] = submit
        processors.append(processor)
    return _with_prompt_logprobs(request, submits, left), processors


def _with_prompt_logprobs(request: ValidGeneration, submits: Submits, left: Submits) -> Submits:
    """Request a prompt's log-probabilities again if one of its choices has not started.

    Each choice starts with an echo of its prompt. The prompt's first remaining choice computes them.
    """
    if not any(submit.sampling.prompt_logprobs for submit in submits.values()):
        return left
    still = {choice // request.n for choice in submits if not request.delivered(choice).has_started}
    firsts = {choice // request.n: choice for choice in reversed(left)}  # the first remaining choice of each prompt
    return {
        choice: replace(
            submit,
            sampling=replace(
                submit.sampling,
                prompt_logprobs=choice // request.n in still and choice == firsts[choice // request.n],
            ),
        )
        for choice, submit in left.items()
    }
