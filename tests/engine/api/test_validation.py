"""The bounds of values in sequences that depend on the model: the last accepted value and the first refused one."""

from typing import Any

import pytest

from pilotlight.engine.api.protocol import ModelInfo, PromptImage, SamplingParams, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.api.validation import refusal

MODEL = ModelInfo("tiny", 16, 100, (), "float32", 4, total_blocks=8, weights_bytes=0, load_s=0.0)
EMBEDDING_MODEL = replace(MODEL, pooling="mean")


def asked(prompt: tuple[int, ...] = (1, 2, 3), sampling: dict[str, Any] | None = None, **fields: Any) -> Submit:
    return Submit("a", "tiny", prompt, SamplingParams(**{"max_tokens": 8, **(sampling or {})}), **fields)


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("num_logprobs", (None, 0, 100), (101,)),
        ("num_prompt_logprobs", (None, 0, 100), (101,)),
        ("logit_bias", ((), ((0, -100.0), (99, 100.0))), (((100, 1.0),),)),
    ],
)
def test_a_sampling_field_has_a_last_value_that_is_taken_and_a_first_that_is_refused(
    field: str, taken: tuple[Any, ...], refused: tuple[Any, ...]
) -> None:
    assert [refusal(asked(sampling={field: value}), MODEL) for value in taken] == [None] * len(taken)
    for value in refused:
        code, sentence = refusal(asked(sampling={field: value}), MODEL) or ("", "")
        assert code == "invalid_request", value
        assert field in sentence


def test_a_token_that_stops_must_be_one_only_where_it_has_to_be_forbidden() -> None:
    assert refusal(asked(sampling={"stop_token_ids": (100, -1)}), MODEL) is None
    assert refusal(asked(sampling={"stop_token_ids": (0, 99), "min_tokens": 1}), MODEL) is None
    for token_id in (100, -1):
        problem = refusal(asked(sampling={"stop_token_ids": (3, token_id), "min_tokens": 1}), MODEL)
        assert problem == ("invalid_request", "stop_token_ids names a token outside the vocabulary of 100 tokens")


@pytest.mark.parametrize(
    ("submit", "says"),
    [
        (asked((0, 99)), None),
        (asked((1,) * 15), None),
        (asked(()), "the prompt is empty"),
        (asked((1, 100, 7)), "token id 100 is outside"),
        (asked((1, -1, 7)), "token id -1 is outside"),
        (asked((1,) * 16), "so a prompt may have at most 15"),
        (asked(pooling="mean"), "tiny is a model that generates"),
        (asked(images=(PromptImage(0, 1, bytes(32)),)), "tiny takes no images"),
    ],
)
def test_a_prompt_fits_its_model(submit: Submit, says: str | None) -> None:
    code, sentence = refusal(submit, MODEL) or ("", None)
    assert (sentence is None) == (says is None)
    if says is not None:
        assert says in (sentence or "")
        assert code == ("context_length_exceeded" if "at most 15" in says else "invalid_request")


def test_a_text_to_be_embedded_may_fill_the_context() -> None:
    assert refusal(asked((1,) * 16, pooling="mean"), EMBEDDING_MODEL) is None
    code, sentence = refusal(asked((1,) * 17, pooling="mean"), EMBEDDING_MODEL) or ("", "")
    assert (code, "takes at most 16" in sentence) == ("context_length_exceeded", True)
    code, sentence = refusal(asked(), EMBEDDING_MODEL) or ("", "")
    assert (code, "it cannot generate text" in sentence) == ("invalid_request", True)
