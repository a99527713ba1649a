"""Reading `config.json`: missing fields, and values that no model can have."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.families import bert_config, dense_decoders
from pilotlight.engine.description.image_sizes import read_image_sizes
from pilotlight.engine.description.recurrent_shapes import DeltaShape
from pilotlight.engine.planning.model_plan import plan_model
from tests.engine.families import FURTHER, MODELS
from tests.engine.vision.test_text_beside_towers import MODELS as BESIDE_TOWERS

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip


def test_heads_that_do_not_divide_the_hidden_size_are_refused() -> None:
    assert bert_config.parse_config(SIZES).num_heads == 4
    with pytest.raises(CheckpointError, match="hidden_size 32 and 5 heads"):
        bert_config.parse_config({**SIZES, "num_attention_heads": 5})


def test_gemmas_windows_turn_by_a_base_of_their_own() -> None:
    config = dense_decoders.gemma3({**SIZES, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6})
    assert [rule.theta for rule in config.rotary] == [1_000_000.0, 10_000.0]


def _with_other_values(config: Any) -> Iterator[Any]:
    """Yield copies of a config, each with one value replaced by an odd value, often of another type."""
    inside = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in inside:
        for other in (None, "x", [[]], {"a": 1}, -1, 0.5, 1e308, *_with_other_values(value)):
            changed = config.copy()
            changed[key] = other
            yield changed


@pytest.mark.long
@pytest.mark.parametrize(
    "file", sorted((Path(__file__).parent / "planning" / "configs").glob("*.json")), ids=lambda file: file.stem
)
def test_values_of_another_type_are_refused_or_ignored(tmp_path: Path, file: Path) -> None:
    count = 0
    for config in _with_other_values(json.loads(file.read_text())):
        try:
            plan_model(config)
        except CheckpointError:
            count += 1
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            read_image_sizes(tmp_path)
        except CheckpointError:
            count += 1
    assert count


ARCHITECTURES = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
FAMILIES = {type(config).__name__: config for config in (*MODELS.values(), *FURTHER.values(), *BESIDE_TOWERS.values())}


def _with_huge_sizes(config: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each key of a whole number in a config, with a copy in which the number is a billion."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        inside = _with_huge_sizes(value) if isinstance(value, dict | list) else ()
        for name, other in ((key, 10**9),) if type(value) is int else inside:
            changed = config.copy()
            changed[key] = other
            yield name, changed


@contextmanager
def _memory_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let this process allocate at most so many further bytes: beyond it, MemoryError is raised."""
    before, pages = resource.getrlimit(resource.RLIMIT_AS), int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_that_no_model_has_are_refused_by_name_or_cost_nothing(family: str) -> None:
    refused = {}
    with _memory_of_at_most(512 << 20):
        for key, config in _with_huge_sizes(json.loads(FAMILIES[family].to_json_string(use_diff=False))):
            try:
                plan_model({**config, "architectures": [ARCHITECTURES[FAMILIES[family].model_type]]})
            except CheckpointError as error:
                refused[key] = str(error)
    assert refused["vocab_size"] == "config.json has vocab_size = 1000000000; it may be 16777216 at most"


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "BertModel", "Gemma3ForCausalLM", "MixtralForCausalLM"])
def test_more_layers_than_any_model_has_are_refused_before_they_are_listed(architecture: str) -> None:
    config = {**SIZES, "architectures": [architecture], "num_key_value_heads": 2, "num_local_experts": 4}
    with (
        _memory_of_at_most(512 << 20),
        pytest.raises(CheckpointError, match="num_hidden_layers = 1000000000; it may be 1024"),
    ):
        plan_model({**config, "num_hidden_layers": 10**9})


def test_ranks_cannot_share_value_heads_in_the_order_of_gguf_files() -> None:
    shape = DeltaShape("linear_attn", 0, 2, 6, 16, 16, 4, 1e-6, is_grouped=False, is_tiled=True)
    with pytest.raises(CheckpointError, match=r"value heads in llama\.cpp's order, which 2 ranks cannot share"):
        shape.part_of(2)
