"""The bounds of values in configuration and requests: the last accepted value and the first refused one on each side."""

import math
from typing import Any

import pytest

from pilotlight.engine.api.protocol import HostConfig, ModelInfo, PromptImage, SamplingParams, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.api.validation import host_problem, refusal

MODEL = ModelInfo("tiny", 16, 100, (), "float32", 4, total_blocks=8, weights_bytes=0, load_s=0.0)
EMBEDDING_MODEL = replace(MODEL, pooling="mean")
VISION_MODEL = replace(MODEL, image_token_id=9)


def asked(prompt: tuple[int, ...] = (1, 2, 3), sampling: dict[str, Any] | None = None, **fields: Any) -> Submit:
    return Submit("a", "tiny", prompt, SamplingParams(**{"max_tokens": 8, **(sampling or {})}), **fields)


def image(position: int, num_tokens: int = 1, num_bytes: int = 32) -> PromptImage:
    return PromptImage(position, num_tokens, bytes(num_bytes))


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("max_tokens", (1,), (0, -1)),
        ("min_tokens", (0, 5), (-1,)),
        ("temperature", (0.0, 1e30), (-1e-9, math.inf, math.nan)),
        ("top_k", (None, 1), (0, -1)),
        ("top_p", (1e-9, 1.0), (0.0, 1.0001, math.nan)),
        ("min_p", (0.0, 1.0), (-1e-9, 1.0001, math.nan)),
        ("num_logprobs", (None, 0, 100), (-1, 101)),
        ("num_prompt_logprobs", (None, 0, 100), (-1, 101)),
        ("repetition_penalty", (0.01, 100.0), (0.0099, 100.1, math.nan)),
        ("presence_penalty", (-2.0, 2.0), (-2.001, 2.001, math.nan)),
        ("frequency_penalty", (-2.0, 2.0), (-2.001, 2.001, math.nan)),
        (
            "logit_bias",
            ((), ((0, -100.0), (99, 100.0))),
            (((100, 1.0),), ((-1, 1.0),), ((3, 100.1),), ((3, -100.1),), ((3, math.nan),), ((3, 1.0), (3, 1.0))),
        ),
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
        (asked((1,), num_delivered_tokens=0), None),
        (asked((1, 2), num_delivered_tokens=1), None),
        (asked(priority=-8), None),
        (asked(priority=8), None),
        (asked(()), "the prompt is empty"),
        (asked((1, 100, 7)), "token id 100 is outside"),
        (asked((1, -1, 7)), "token id -1 is outside"),
        (asked((1, 2), num_delivered_tokens=2), "num_delivered_tokens is 2"),
        (asked((1, 2), num_delivered_tokens=-1), "num_delivered_tokens is -1"),
        (asked(priority=-9), "priority is -9; it must be from -8"),
        (asked(priority=9), "priority is 9"),
        (asked((1,) * 16), "so a prompt may have at most 15"),
        (asked(pooling="mean"), "tiny is a model that generates"),
        (asked(images=(image(0),)), "tiny takes no images"),
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


@pytest.mark.parametrize(
    ("images", "says"),
    [
        ((image(0), image(1), image(2)), ""),
        ((image(0, 2), image(2)), ""),
        ((image(1, 2), image(2)), "after those of the previous image"),
        ((image(3),), "they must be in the prompt"),
        ((image(-1),), "they must be in the prompt"),
        ((image(0, 0),), "an image's tokens are 0 from 0 on"),
        ((image(0, num_bytes=31),), "a sha256 has 32"),
        ((image(0, num_bytes=33),), "has 33 bytes"),
        ((image(1, 3),), ""),
        ((replace(image(1, 2), is_bidirectional=True),), ""),
        ((replace(image(1, 3), is_bidirectional=True),), "end at 4; all of them must be in the prompt"),
    ],
)
def test_images_are_in_the_prompt_one_after_the_other(images: tuple[PromptImage, ...], says: str) -> None:
    code, sentence = refusal(asked(images=images), VISION_MODEL) or ("", "")
    assert (code, says in sentence, bool(sentence)) == ("invalid_request" if says else "", True, bool(says))


AT_LEAST = {
    **dict.fromkeys(("block_size", "max_num_batched_tokens", "max_num_seqs", "max_waiting", "adapter_slots"), 1),
    "threads": 1,
    **dict.fromkeys(("max_decode_delay_ms", "kv_bytes", "kv_disk_bytes", "kv_disk_write_bytes_per_s"), 0),
    "kv_host_bytes": 0,
}


@pytest.mark.parametrize(("name", "least"), AT_LEAST.items())
def test_a_hosts_number_has_a_least_value(name: str, least: int) -> None:
    assert host_problem(HostConfig(**{name: least})) is None
    told = host_problem(HostConfig(**{name: least - 1}))
    assert told is not None
    assert told.startswith(f"{name} is {least - 1}; it must be ")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_host_bytes": 1, "kv_host_dir": "/h"}, ""),
        ({"kv_host_bytes": 1}, "kv_host_dir is missing"),
        ({"kv_disk_dir": "/d"}, "kv_disk_dir is set"),
        ({"kv_store": "h:1"}, "kv_store is set"),
        ({"peer_address": "ipc://p"}, "peer_address is set"),
        ({"kv_disk_dir": "/d", "kv_store": "h:1", "kv_host_bytes": 1, "kv_host_dir": "/h", "threads": 1}, ""),
    ],
)
def test_tiers_below_the_host_tier_need_it(fields: dict[str, Any], says: str) -> None:
    told = host_problem(HostConfig(**fields))
    assert says in (told or "")
    assert bool(told) == bool(says)
