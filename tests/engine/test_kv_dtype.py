"""A KV cache in FP8: tokens do not depend on the path of blocks, results are close to those of a plain cache, and it takes a quarter of the bytes of
fp32. Its blocks are never confused with those of another type.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig, Submit
from pilotlight.engine.kv.shared_tiers import open_tiers
from pilotlight.engine.kv.tiered_cache import TieredCache
from pilotlight.engine.weights.formats.kv_scales import read_kv_scales
from tests.checkpoints import write_llama
from tests.engine.driver import Heard, drain, drain_preempting, load_engine, one, random_prompt, runner_of, submit
from tests.engine.families import write_family
from tests.engine.test_hand_over import Pair

pytestmark = pytest.mark.usefixtures("always_worth_it")
PROMPT = random_prompt(70, seed=1)
SCALE = "model.layers.{}.self_attn.{}_scale"


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("windowed")
    write_family(directory, "gpt-oss, three of five experts")
    return directory


def requests() -> list[Submit]:
    return [
        submit("greedy", PROMPT, max_tokens=20),
        submit("repeats", random_prompt(9, seed=2) * 5, max_tokens=20),
        submit("first", PROMPT[:33], max_tokens=20, temperature=1.0, seed=1),
        submit("second", PROMPT[:33], leader="first", max_tokens=20, temperature=1.0, seed=2),
        submit("penalised", PROMPT[:50], max_tokens=20, repetition_penalty=1.3, num_logprobs=2),
    ]


def told(heard: dict[str, Heard]) -> dict[str, list[int]]:
    return {name: one.token_ids for name, one in heard.items()}


def alone(directory: Path, messages: list[Submit]) -> dict[str, list[int]]:
    engine = load_engine(directory, kv_dtype="fp8")
    return {message.sequence_id: one(engine, message).token_ids for message in messages}


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[int]]:
    return alone(checkpoint, requests())


@pytest.mark.parametrize(
    "how",
    [
        {"max_num_batched_tokens": 13},
        {"kv_tokens": 160, "max_num_batched_tokens": 50},
        {"depth": 2, "block_size": 5},
        {"speculate": "suffix"},
    ],
    ids=["small chunks", "preempted", "overlapped", "drafts"],
)
def test_company_chunks_preemption_and_drafts_change_no_token(
    checkpoint: Path, expected: dict[str, list[int]], how: dict[str, Any]
) -> None:
    engine = load_engine(checkpoint, kv_dtype="fp8", **how)
    answer = drain_preempting if "kv_tokens" in how else drain
    assert told(answer(engine, requests())) == expected
    assert told(drain(engine, requests())) == expected, "a warm cache must not change answers"
    assert ("kv_tokens" in how) == (engine.scheduler.counts.preemptions > 0)


def test_windows_sinks_and_experts_go_with_it(windowed: Path) -> None:
    messages = requests()
    engine = load_engine(windowed, kv_dtype="fp8", max_num_batched_tokens=24)
    assert told(drain(engine, messages)) == alone(windowed, messages)


def test_log_probabilities_are_close_to_those_of_a_plain_cache_in_a_quarter_of_the_bytes(checkpoint: Path) -> None:
    engines = [load_engine(checkpoint, kv_dtype=kv_dtype) for kv_dtype in ("auto", "fp8")]
    ask = submit("a", PROMPT, max_tokens=1, prompt_logprobs=True)
    plain, narrow = (
        torch.tensor([reported.logprob for reported in one(engine, ask).prompt_logprobs or ()]) for engine in engines
    )
    assert len(plain) == len(narrow) == len(PROMPT) - 1
    assert 0 < float((plain - narrow).abs().mean()) < 0.1
    sizes = [runner_of(engine).layout.block_bytes for engine in engines]
    assert sizes[0] == 4 * sizes[1], "plain keys and values are fp32"


def test_blocks_come_back_from_host_and_disk_and_none_of_them_to_a_plain_cache(
    checkpoint: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    for host, kv_dtype, hits in (("a", "fp8", 0), ("a", "fp8", 64), ("b", "fp8", 64), ("b", "auto", 0)):
        config = HostConfig(
            kv_host_bytes=4 << 20,
            kv_host_dir=str(tmp_path / host),
            kv_disk_bytes=4 << 20,
            kv_disk_dir=str(tmp_path / "d"),
        )
        tiers = open_tiers(config)
        assert tiers is not None
        assert tiers.disk is not None
        assert tiers.disk.wait_until_idle(10)
        engine = load_engine(checkpoint, tiers=tiers, kv_dtype=kv_dtype)
        heard = one(engine, submit("greedy", PROMPT, max_tokens=20))
        assert heard.num_cached_tokens == hits
        assert kv_dtype == "auto" or heard.token_ids == expected["greedy"]
        assert isinstance(engine.tiers, TieredCache)
        assert engine.tiers.wait_until_idle(10)
        engine.close()
        tiers.close()


def test_a_prompt_is_handed_over_in_fp8(checkpoint: Path, expected: dict[str, list[int]], tmp_path: Path) -> None:
    pair = Pair(checkpoint, tmp_path, max_num_batched_tokens=48, kv_dtype="fp8")
    heard = pair.answer([submit("greedy", PROMPT, max_tokens=20)])["greedy"]
    assert (heard.token_ids, heard.num_fetched_tokens) == (expected["greedy"], 64)
    pair.assert_nothing_is_left()
    pair.close()


def test_a_host_with_a_plain_cache_hands_nothing_over_to_one_in_fp8_and_says_why(
    checkpoint: Path, expected: dict[str, list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(checkpoint, tmp_path, max_num_batched_tokens=48)
    pair.decode.close()
    pair.decode = load_engine(checkpoint, tiers=pair.tiers[1], max_num_batched_tokens=48, kv_dtype="fp8")
    heard = pair.answer([submit("greedy", PROMPT, max_tokens=20)])["greedy"]
    assert (heard.token_ids, heard.num_fetched_tokens) == (expected["greedy"], 0)
    assert "differs from the reader's in layout" in caplog.text
    pair.assert_nothing_is_left()
    pair.close()


def with_scales(directory: Path, scales: dict[str, torch.Tensor]) -> Path:
    write_llama(directory)
    file = directory / "model.safetensors"
    save_file(load_file(file) | scales, file)
    return directory


def test_scales_of_the_checkpoint_are_the_caches(tmp_path: Path) -> None:
    scales = {
        SCALE.format(0, "k"): torch.tensor([0.25]),
        SCALE.format(0, "v"): torch.tensor(0.5, dtype=torch.bfloat16),
        SCALE.format(1, "k_proj.k"): torch.tensor([2.0]),
        "model.layers.1.mixer.v_proj.v_scale": torch.tensor([3.0]),  # Nemotron's name
    }
    directory = with_scales(tmp_path, scales)
    assert read_kv_scales(directory) == {0: (0.25, 0.5), 1: (2.0, 3.0)}
    engine = load_engine(directory, kv_dtype="fp8")
    layout = runner_of(engine).layout
    views = layout.views(layout.new_blocks(1, torch.device("cpu")))
    assert [view.scales.tolist() for view in views[:2]] == [[0.25, 0.5], [2.0, 3.0]]
    assert len(one(engine, submit("a", PROMPT)).token_ids) == 8


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (torch.tensor([0.0]), "k_scale is 0.0, but a scale must be positive"),
        (torch.tensor([float("nan")]), "k_scale is nan"),
        (torch.tensor([float("inf")]), "k_scale is inf"),
        (torch.ones(2), r"k_scale has shape \[2\]: FP8 needs one scale for all heads"),
    ],
)
def test_what_is_no_scale_is_refused_where_it_is_needed(tmp_path: Path, scale: torch.Tensor, reason: str) -> None:
    directory = with_scales(tmp_path, {SCALE.format(0, "k"): scale})
    with pytest.raises(CheckpointError, match=reason):
        load_engine(directory, kv_dtype="fp8")
    load_engine(directory).close()


LATENT = (
    "deepseek-v3, three experts in two of four groups, yarn",
    "deepseek-v3.2, 13 keys, three of eight experts in one of two groups, yarn",
    "glm-5, 17 keys, layer 1 shares",
)


# Where an index selects a fifth of the keys, some of them are others with keys in FP8.
@pytest.mark.parametrize(("family", "most"), [*zip(LATENT, (0.1, 0.3, 0.3), strict=True)])
def test_latent_vectors_and_keys_of_an_index_are_close_to_those_of_a_plain_cache(
    tmp_path: Path, family: str, most: float
) -> None:
    write_family(tmp_path, family)
    engines = [load_engine(tmp_path, kv_dtype=kv_dtype) for kv_dtype in ("auto", "fp8")]
    ask = submit("a", PROMPT, max_tokens=1, prompt_logprobs=True)
    plain, narrow = (
        torch.tensor([reported.logprob for reported in one(engine, ask).prompt_logprobs or ()]) for engine in engines
    )
    assert 0 < float((plain - narrow).abs().mean()) < most
    sizes = [runner_of(engine).layout.block_bytes for engine in engines]
    assert 3 * sizes[1] < sizes[0]


@pytest.mark.parametrize("family", LATENT)
@pytest.mark.parametrize(
    "how",
    [{"max_num_batched_tokens": 13}, {"kv_tokens": 160, "max_num_batched_tokens": 50}, {"depth": 2, "block_size": 5}],
    ids=["small chunks", "preempted", "overlapped"],
)
def test_tokens_of_narrow_latent_vectors_depend_on_no_path(tmp_path: Path, family: str, how: dict[str, Any]) -> None:
    write_family(tmp_path, family)
    expected = alone(tmp_path, requests())
    engine = load_engine(tmp_path, kv_dtype="fp8", **how)
    answer = drain_preempting if "kv_tokens" in how else drain
    assert told(answer(engine, requests())) == expected
    assert told(drain(engine, requests())) == expected
