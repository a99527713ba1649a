"""The comparison of the engine with `transformers`: every reported distribution must equal that of the reference model."""

from typing import Any

import torch
from transformers import PreTrainedModel

from pilotlight.engine.api.protocol import Submit, TokenLogprobs
from tests.engine.driver import Heard, submit

VOCAB = 431
TOLERANCE = 1e-4  # of a log-probability; both models compute in fp32


def as_distribution(reported: TokenLogprobs) -> torch.Tensor:
    distribution = torch.full((VOCAB,), torch.nan)
    ids, logprobs = zip(*reported.top, strict=True)
    distribution[list(ids)] = torch.tensor(logprobs)
    return distribution


def assert_agrees(model: PreTrainedModel, prompt: list[int], heard: Heard) -> None:
    """Check every reported distribution, of prompt and output tokens, against one pass of the reference model over the whole text."""
    assert heard.error is None
    with torch.inference_mode():
        # Without `output_hidden_states` transformers 5.23 fails for a Gemma 4 whose layers share keys and have no inputs besides hidden states.
        logits = model(torch.tensor([prompt + heard.token_ids]), output_hidden_states=True).logits[0]
    expected = logits.log_softmax(-1)
    for i, reported in enumerate(heard.logprobs):
        row = expected[len(prompt) + i - 1]
        assert (as_distribution(reported) - row).abs().max() <= TOLERANCE, f"output token {i}"
        assert abs(reported.logprob - row[heard.token_ids[i]]) <= TOLERANCE
    for i, reported in enumerate(heard.prompt_logprobs or ()):
        assert (as_distribution(reported) - expected[i]).abs().max() <= TOLERANCE, f"prompt token {i + 1}"
        assert abs(reported.logprob - expected[i][prompt[i + 1]]) <= TOLERANCE


def full(sequence_id: str, prompt: list[int], **sampling: Any) -> Submit:
    return submit(sequence_id, prompt, num_logprobs=VOCAB, **sampling)
