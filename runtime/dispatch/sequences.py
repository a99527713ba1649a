"""Sequences made from a client's: the rest after delivered tokens, and a hand-over's two halves.

Independent of hosts, which dispatcher.py chooses.
"""

import os
from collections.abc import Sequence

from msgspec.structs import replace

from pilotlight.engine.api.protocol import PRIORITIES, BlockSource, SamplingParams, Submit

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def remaining(submit: Submit, delivered: Sequence[int]) -> Submit:
    """Return the sequence that continues after the delivered tokens, which become part of its prompt.

    Positions, counts and random numbers continue.
    """
    sampling = replace(
        submit.sampling,
        max_tokens=submit.sampling.max_tokens - len(delivered),
        prompt_logprobs=False,  # log-probabilities of the prompt came with the first token
    )
    return replace(
        submit,
        prompt_token_ids=submit.prompt_token_ids + tuple(delivered),
        sampling=sampling,
        num_delivered_tokens=submit.num_delivered_tokens + len(delivered),
        priority=PRIORITIES[0],  # a sequence that had been admitted does not queue behind newcomers
    )


def prefill_sequence(submit: Submit, block_size: int) -> Submit:
    """Return the sequence that computes a prompt's full blocks for another host.

    Its prompt has one token more than these blocks, so that all full blocks can be found in the cache, and the rest of an image whose tokens see each
    other.
    """
    num_tokens = (len(submit.prompt_token_ids) - 1) // block_size * block_size + 1
    cut_images = [image for image in submit.images if image.is_bidirectional and image.position < num_tokens]
    num_tokens = max([num_tokens, *[image.position + image.num_tokens for image in cut_images]])
    return Submit(
        os.urandom(16).hex(),
        submit.model,
        submit.prompt_token_ids[:num_tokens],
        _ONE_TOKEN,
        submit.salt,
        priority=submit.priority,
        hands_over=True,
        adapter=submit.adapter,
        images=tuple(image for image in submit.images if image.position < num_tokens),
        waited_s=submit.waited_s,
    )


def decode_sequence(submit: Submit, prefill: Submit, address: str, within_s: float) -> Submit:
    """Return the sequence that fetches the blocks of `prefill`, which are served at `address`."""
    return replace(submit, fetch_from=BlockSource(address, prefill.sequence_id, within_s))
