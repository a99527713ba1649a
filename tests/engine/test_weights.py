"""Checkpoints that cannot be loaded: each error names the tensor or key and the file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotlight.engine.api.errors import CheckpointError, TokenizerError
from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.text.chat_template import ChatTemplateError
from pilotlight.engine.weights.checkpoint import index_checkpoint
from pilotlight.engine.weights.filling import fill
from pilotlight.engine.weights.storage import Job
from pilotlight.runtime.models.text import TextSide
from tests.checkpoints import change_config, change_tensors, write_llama
from tests.engine.driver import load_engine, one, submit
from tests.fakes import byte_tokenizer

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_llama(tmp_path)
    return tmp_path


def test_a_missing_tensor_is_named(directory: Path) -> None:
    change_tensors(directory, lambda tensors: tensors.pop(NORM))
    with pytest.raises(CheckpointError, match=f"{NORM} is missing from model.safetensors"):
        load_engine(directory)


def test_an_unexpected_tensor_is_named(directory: Path) -> None:
    change_tensors(directory, lambda tensors: tensors.update({"model.surprise.weight": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"model\.surprise\.weight"):
        load_engine(directory)


def test_layers_that_predict_further_tokens_are_named_once_in_the_log(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    further = {f"mtp.layers.0.{name}.weight": torch.zeros(3) for name in ("norm", "fc")}
    change_tensors(directory, lambda tensors: tensors.update(further))
    caplog.set_level("INFO")
    load_engine(directory)
    told = f"{directory}: the layers that predict further tokens (2 tensors, mtp.*) are not used"
    assert caplog.messages.count(told) == 1


def test_a_misshapen_tensor_is_named_with_both_shapes(directory: Path) -> None:
    change_tensors(directory, lambda tensors: tensors.update({NORM: torch.zeros(41)}))
    with pytest.raises(CheckpointError, match=r"has shape \[41\], but config.json makes it \[42\]"):
        load_engine(directory)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_value_that_is_no_number_is_named_by_its_tensor(directory: Path, value: float) -> None:
    change_tensors(directory, lambda tensors: tensors[NORM].index_fill_(0, torch.tensor([7]), value))
    with pytest.raises(CheckpointError, match=f"{NORM} in model.safetensors holds NaN or infinity"):
        load_engine(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_noticed_before_it_is_read(directory: Path, keep: float) -> None:
    file = directory / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else int(keep)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load_engine(directory)


def test_a_damaged_header_is_no_crash(directory: Path) -> None:
    file = directory / "model.safetensors"
    for header in (
        b"not json",
        b"[1]",
        b'{"a": {"dtype": "F32"}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e999]}}',
        b'{"a":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,8]}}',
    ):
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            load_engine(directory)


def header_of(**tensors: Any) -> bytes:
    return json.dumps(tensors).encode()


def entry(start: int, end: int, shape: list[Any] | None = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data_bytes", "reason"),
    [
        (header_of(a=entry(0, 6), b=entry(4, 8)), 8, "tensor b .* begins at byte 4 .* end at 6"),
        (header_of(a=entry(0, 4), b=entry(6, 8)), 8, "tensor b .* begins at byte 6 .* end at 4"),
        (header_of(a=entry(2, 8)), 8, "tensor a .* begins at byte 2 .* end at 0"),
        (header_of(a=entry(0, 4)), 8, "the last 4 bytes of model.safetensors belong to no tensor"),
        (header_of(), 8, "the last 8 bytes of model.safetensors belong to no tensor"),
        (header_of(a=entry(0, 8, dtype="F99")), 8, "tensor a .* has the unknown type F99"),
        (header_of(a=entry(0, 8, dtype=["U8"])), 8, "tensor a .* is described wrongly"),
        (header_of(a=entry(0, 1, [True])), 1, "tensor a .* is described wrongly"),
        (header_of(a=entry(0, 2, [2.0])), 2, "tensor a .* is described wrongly"),
        (header_of(a=entry(0, 2, ["2"])), 2, "tensor a .* is described wrongly"),
        (header_of(a=entry(0, 2, [-2])), 2, "tensor a .* is described wrongly"),
        (header_of(a=entry(0, 0, [1 << 62] * 100)), 0, "tensor a .* is described wrongly"),
        (header_of(a=entry(0, 0, [1 << 62, 1 << 62])), 0, "tensor a .* has 0 bytes"),
        (header_of(a={**entry(0, 2), "data_offsets": [False, 2]}), 2, "tensor a .* is described wrongly"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', 1, "damaged .* a is there twice"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', 1, "damaged .* dtype is there twice"),
    ],
)
def test_tensors_that_do_not_fill_their_file_are_refused(
    tmp_path: Path, header: bytes, data_bytes: int, reason: str
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(data_bytes))
    with pytest.raises(CheckpointError, match=reason):
        index_checkpoint(tmp_path)


def test_types_that_no_model_asks_for_may_be_in_a_file(tmp_path: Path) -> None:
    header = header_of(
        a=entry(0, 8, [1], "F64"), b=entry(8, 9, [2], "F4"), c=entry(9, 9, [0]), d=entry(9, 10, [1], "BOOL")
    )
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(10))
    assert [tensor.dtype for tensor in index_checkpoint(tmp_path).values()] == ["F64", "F4", "U8", "BOOL"]


def test_a_header_larger_than_any_model_needs_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((33 << 20).to_bytes(8, "little"))
        file.truncate(40 << 20)
    with pytest.raises(CheckpointError, match="more than 32 MiB"):
        index_checkpoint(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    ],
)  # fmt: skip
def test_a_pipe_or_a_folder_in_place_of_a_file_blocks_no_caller(
    directory: Path, name: str, make: Callable[[Path], None]
) -> None:
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / ("model.safetensors" if name.endswith("index.json") else name)).unlink(missing_ok=True)
    make(directory / name)
    with pytest.raises((CheckpointError, TokenizerError, ChatTemplateError), match="it is not a plain file"):
        load_whole(directory)


def load_whole(directory: Path) -> None:
    TextSide.from_directory(directory)
    load_engine(directory)


def test_a_type_that_is_not_supported_is_named(directory: Path) -> None:
    change_tensors(directory, lambda tensors: tensors.update({NORM: torch.zeros(42, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match=f"{NORM} in model.safetensors has type I8"):
        load_engine(directory)


def test_a_shard_that_the_index_lists_must_be_there(tmp_path: Path) -> None:
    write_llama(tmp_path, max_shard_size="150KB")
    victim = sorted(tmp_path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim.name} is missing"):
        load_engine(tmp_path)


def test_a_tensor_that_two_shards_have_is_read_from_the_one_that_the_index_names(tmp_path: Path) -> None:
    weight_map = {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file in weight_map.values():
        save_file({name: torch.zeros(2) for name in "abc"}, tmp_path / file)
    stored = index_checkpoint(tmp_path)
    assert {name: tensor.file.name for name, tensor in stored.items()} == weight_map


@pytest.mark.parametrize("elsewhere", [["a"], ["a", "b"]])
def test_a_tensor_that_its_shard_lacks_is_not_taken_from_another(tmp_path: Path, elsewhere: list[str]) -> None:
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({name: torch.zeros(2) for name in elsewhere}, tmp_path / "1.safetensors")
    save_file({"c": torch.zeros(2)}, tmp_path / "2.safetensors")
    with pytest.raises(
        CheckpointError, match=r"tensor b is missing from 2\.safetensors, though model\.safetensors\.index\.json"
    ):
        index_checkpoint(tmp_path)


def test_an_index_cannot_reach_outside_its_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside its directory"):
        index_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "MambaForCausalLM, which is not supported here; the nearest is LlamaForCausalLM",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported for LlamaForCausalLM is 'silu'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"num_key_value_heads": 4}, "6 heads, 4 key-value heads"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
            "'dynamic'; supported are default, linear, llama3, yarn",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn' without factor"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "factor = 0.0; it must be a positive"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "four"}}, "factor = 'four'; it must be a number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'; it must be true or false"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "without low_freq_factor"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            r"quantized \(bitsandbytes\); supported for LlamaForCausalLM are float32,",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"quantized \(mxfp4\); supported for LlamaForCausalLM"),
    ],
)
def test_a_configuration_beyond_the_model_is_refused(directory: Path, changes: dict[str, Any], words: str) -> None:
    change_config(directory, **changes)
    with pytest.raises(CheckpointError, match=words):
        load_engine(directory)


def test_an_invalid_directory_gets_the_definition_of_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a model is a directory with config\.json"):
        load_engine(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        load_engine(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load_engine(tmp_path)


def test_a_cache_that_does_not_fit_is_refused_with_both_sizes(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"asks for 10000000 tokens of KV cache, 4800000000 bytes.*67108864"):
        load_engine(directory, kv_tokens=10_000_000)


@pytest.mark.parametrize("kv_tokens", [None, 100])
@pytest.mark.parametrize("damage", ["weights", "generation_config.json"])
def test_a_refused_model_leaves_the_arena_as_it_was(directory: Path, kv_tokens: int | None, damage: str) -> None:
    from pilotlight.engine.loading.kv_memory import make_kv_memory
    from pilotlight.engine.loading.loading import load_model

    config = HostConfig(kv_bytes=1 << 20)
    memory = make_kv_memory(config)
    if damage == "weights":
        change_tensors(directory, lambda tensors: tensors.pop(NORM))
    else:
        (directory / damage).write_text(json.dumps({"eos_token_id": "seven"}))
    with pytest.raises(CheckpointError):
        load_model(ModelSpec("tiny", str(directory), kv_tokens=kv_tokens), config, memory)
    assert memory.slabs.num_free == memory.slabs.largest_run == 16


def test_a_model_that_yields_no_numbers_is_not_ready(directory: Path) -> None:
    large = {"lm_head.weight": torch.full((431, 42), 3e38), "model.norm.weight": torch.full((42,), 1e5)}
    change_tensors(directory, lambda tensors: tensors.update(large))
    with pytest.raises(CheckpointError, match="logits are not finite"):
        load_engine(directory)


def test_ends_of_turns_outside_the_vocabulary_end_nothing(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [431, 100_000, -1, 7]}))
    engine = load_engine(directory)
    asked = submit("a", [1, 2, 3], max_tokens=4, min_tokens=4, ignore_eos=False)
    assert len(one(engine, asked).token_ids) == 4
    assert engine.info.eos_token_ids == (1, 7)


def test_a_cache_for_less_than_two_tokens_is_refused(directory: Path) -> None:
    with pytest.raises(CheckpointError, match="has room for only 1 token"):
        load_engine(directory, kv_tokens=1, block_size=1)


def test_models_borrow_what_reservations_leave(directory: Path) -> None:
    from pilotlight.engine.loading.kv_memory import make_kv_memory
    from pilotlight.engine.loading.loading import load_model

    config = HostConfig(kv_bytes=1 << 20)
    memory = make_kv_memory(config)
    a, b = (load_model(ModelSpec(name, str(directory)), config, memory).engine for name in "ab")
    whole = (1 << 20) // 7680  # a block of 16 tokens takes 7,680 bytes
    assert a.info.total_blocks == b.info.total_blocks == a.load().free_blocks == whole
    own = load_model(ModelSpec("own", str(directory), kv_tokens=512), config, memory).engine
    assert own.info.total_blocks == own.load().free_blocks == own.load().total_blocks == 32
    assert a.load().total_blocks == b.load().total_blocks == 12 * (64 << 10) // 7680
    with pytest.raises(CheckpointError, match=r"asks for 2000 tokens.*960000 bytes.*the arena can give 720896"):
        load_model(ModelSpec("more", str(directory), kv_tokens=2000), config, memory)


def test_blocks_too_large_for_the_arenas_slabs_are_refused(directory: Path) -> None:
    from pilotlight.engine.loading.kv_memory import make_kv_memory
    from pilotlight.engine.loading.loading import load_model

    config = HostConfig(kv_bytes=1 << 20, block_size=128)
    arithmetic = r"a block of 128 tokens takes 61440 bytes \(3 layers of k 2 x 10 x 4 bytes \+ v 2 x 10 x 4 bytes\)"
    with pytest.raises(CheckpointError, match=rf"more than half of a slab \(65536 bytes\); {arithmetic}.*kv_gib"):
        load_model(ModelSpec("tiny", str(directory)), config, make_kv_memory(config))


def test_old_configurations_and_leftovers_of_old_checkpoints_are_understood(directory: Path) -> None:
    tokens = one(load_engine(directory), submit("a", [5, 6, 7])).token_ids
    config = json.loads((directory / "config.json").read_text())
    del config["rope_parameters"]
    (directory / "config.json").write_text(json.dumps(config | {"rope_theta": 10_000.0, "rope_scaling": None}))
    leftover = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(5)}
    change_tensors(directory, lambda tensors: tensors.update(leftover))
    assert one(load_engine(directory), submit("a", [5, 6, 7])).token_ids == tokens


def test_ends_of_turns_come_from_both_configurations(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_engine(directory).info.eos_token_ids == (1, 7, 9)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": "seven"}))
    with pytest.raises(CheckpointError, match="eos_token_id = 'seven'"):
        load_engine(directory)


def test_progress_rises_to_the_total(directory: Path) -> None:
    seen: list[tuple[int, int]] = []
    stored = index_checkpoint(directory)
    fill([Job(name, (one,), torch.empty(one.shape)) for name, one in stored.items()], (), lambda *at: seen.append(at))
    total = sum(t.nbytes for t in load_file(directory / "model.safetensors").values())
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


def test_the_context_is_the_smaller_of_model_and_cache(directory: Path) -> None:
    assert load_engine(directory, kv_tokens=4096).info.context_length == 256
    assert load_engine(directory, kv_tokens=100).info.context_length == 112  # rounded up to whole blocks
