"""GGUF files whose blocks are multiplied in place: correct answers, little memory beside the file, and a relocation without effect on answers."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, Qwen2Config

from pilotlight.engine.api.struct import replace
from pilotlight.engine.gguf.directory import directory_of
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.weights.relocation import HugePages
from pilotlight.kernels.cpu import library
from tests.engine.agreement import as_distribution, full
from tests.engine.driver import drain, one, random_prompt
from tests.engine.gguf.files import Kind, write_both
from tests.engine.test_in_place import COPIED, answers, load
from tests.engine.test_mapped_weights import CONFIG

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere weights are read"),
]
# The tolerance of log-probabilities. Inputs are rounded to 8 bits in groups of 32 columns; 0.15 was observed, also with torch.
ROUNDED = 0.25


@pytest.fixture(scope="module")
def memory() -> KvMemory:
    library.start(wait=True)
    if not library.takes_codes():
        pytest.skip("there is no C library, or it has no vector instructions here")
    return make_kv_memory(CONFIG)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "kind"), [(LlamaConfig, Kind.Q4_1), (LlamaConfig, Kind.Q8_0), (Qwen2Config, Kind.Q5_0)]
)
def test_blocks_in_place_answer_as_their_numbers_before_and_after_the_move(
    family: type, kind: Kind, tmp_path: Path, memory: KvMemory
) -> None:
    """GGUF files of Llama have queries and keys in another order of rows, so these are copied; those of Qwen are used in place."""
    changes = {"intermediate_size": 65536} | ({"head_dim": None} if family is Qwen2Config else {})
    checkpoint, file = write_both(tmp_path, family, kind, **changes)
    expected = answers(load(checkpoint, None, memory), close=True)
    for kept_at in (tmp_path / "bundle", None):
        loaded = load(directory_of(file, tmp_path / "store"), kept_at, memory)
        assert "map" in dict(loaded.engine.info.load_phases)
        first = answers(loaded)
        moving = loaded.under_weights
        assert isinstance(moving, HugePages)
        assert moving.wait(60)
        assert moving.moved_bytes >= 4 << 20
        assert loaded.engine.info.weights_bytes < 1.1 * file.stat().st_size
        second = answers(loaded, close=True)
        assert not (tmp_path / "bundle").exists(), "no bundle is made, as the file itself outlives a host"
        for found, moved, numbers in zip(first, second, expected, strict=True):
            assert moved.logprobs == found.logprobs
            for own, other in zip(found.logprobs[:1], numbers.logprobs[:1], strict=True):
                off = (as_distribution(own) - as_distribution(other)).nan_to_num().abs().max()
                assert off <= ROUNDED, float(off)


def test_a_small_model_is_copied_in_blocks(tmp_path: Path, memory: KvMemory) -> None:
    _, file = write_both(tmp_path, LlamaConfig, Kind.Q4_0)
    loaded = load(directory_of(file, tmp_path / "store"), None, memory, limits=COPIED)
    assert "map" not in dict(loaded.engine.info.load_phases)
    assert loaded.engine.info.weights_bytes < 1.1 * file.stat().st_size
    assert all(
        torch.tensor([one.logprob for one in heard.logprobs]).isfinite().all() for heard in answers(loaded, close=True)
    )


def test_experts_in_mxfp4_with_biases_answer_as_their_numbers(tmp_path: Path, memory: KvMemory) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 15, "swiglu_limit": 7.0}
    checkpoint, file = write_both(tmp_path, GptOssConfig, Kind.Q8_0, of_experts=Kind.MXFP4, **experts)
    expected = answers(load(checkpoint, None, memory), close=True)
    loaded = load(directory_of(file, tmp_path / "store"), None, memory)
    assert loaded.engine.info.weights_bytes < 1.1 * file.stat().st_size
    for found, numbers in zip(answers(loaded, close=True), expected, strict=True):
        off = (as_distribution(found.logprobs[0]) - as_distribution(numbers.logprobs[0])).nan_to_num().abs().max()
        assert off <= ROUNDED, float(off)


def test_a_sequence_has_the_same_tokens_alone_and_in_a_batch(tmp_path: Path, memory: KvMemory) -> None:
    """A stream that continues at another site is computed in another batch."""
    _, file = write_both(tmp_path, LlamaConfig, Kind.Q4_0)
    loaded = load(directory_of(file, tmp_path / "store"), None, memory)
    try:
        requests = [full(str(i), random_prompt(9, seed=i), max_tokens=12, salt=b"batch") for i in range(12)]
        together = drain(loaded.engine, requests)
        for request in requests[:3]:
            alone = one(loaded.engine, replace(request, salt=b"alone"))
            heard = together[request.sequence_id]
            assert alone.token_ids == heard.token_ids
            assert alone.logprobs[1:] == heard.logprobs[1:]  # decode steps with one row and with twelve
    finally:
        loaded.close()
