"""Quantized checkpoints give the answers of a model with their dequantized values, whether matrices are unpacked at load, as on a CPU, or stay
packed, as on CUDA."""

import json
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    FalconH1Config,
    KimiLinearConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    NemotronHConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.mla.latent_attention import LatentAttention
from pilotlight.engine.layers.recurrent import JoinedMixers
from pilotlight.engine.loading.dry_run import DryRun, lay_out
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.models.model_registry import find_family
from pilotlight.engine.tools.packing import Report, pack_directory
from pilotlight.engine.weights.checkpoint import index_checkpoint
from pilotlight.engine.weights.config import read_config
from pilotlight.engine.weights.formats.fp8 import Fp8Format
from pilotlight.engine.weights.formats.int4 import Int4Format
from pilotlight.engine.weights.formats.int8 import Int8Format
from pilotlight.engine.weights.formats.mxfp4 import Mxfp4Format
from pilotlight.engine.weights.formats.weight_formats import read_format
from pilotlight.engine.weights.storage import MetaStorage
from pilotlight.kernels.cpu import library
from pilotlight.kernels.matrices.plain import PlainWeight
from tests.checkpoints import change_tensors
from tests.cpu_kernels import TORCH, computing_with
from tests.engine import quantizers
from tests.engine.agreement import assert_agrees, full
from tests.engine.driver import load_engine, one, random_prompt, runner_of
from tests.engine.families import PACKED, write_family
from tests.engine.file_faults import forbid_checkpoints, full_file_system
from tests.engine.parallel.test_compositions import FURTHER, MODELS
from tests.engine.quantizers import pack_quantized, write_quantized
from tests.engine.test_mapped_weights import answer

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": None, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
SCOUT: dict[str, Any] = {
    "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "moe_layers": [0, 2], "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 16,
}  # fmt: skip
INTEGERS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "compressed-tensors": lambda d: write_quantized(d, LlamaConfig, quantizers.compressed_tensors, pack_quantized()),
    "compressed-tensors, by row, zeros": lambda d: write_quantized(
        d, LlamaConfig, partial(quantizers.compressed_tensors, group=None, symmetric=False),
        pack_quantized(strategy="channel", group_size=None, symmetric=False),
    ),
    "compressed-tensors, scattered": lambda d: write_quantized(
        d, LlamaConfig, partial(quantizers.compressed_tensors, scattered=True), pack_quantized(actorder="group")
    ),
    "gptq": lambda d: write_quantized(d, LlamaConfig, quantizers.gptq, GPTQ),
    "gptq, scattered": lambda d: write_quantized(d, Qwen2Config, partial(quantizers.gptq, scattered=True), GPTQ | {"desc_act": True}, head_dim=None),
    "gptq, version 2": lambda d: write_quantized(
        d, LlamaConfig, partial(quantizers.gptq, version=2), GPTQ | {"checkpoint_format": "gptq_v2"}
    ),
    "awq": lambda d: write_quantized(d, LlamaConfig, quantizers.awq, AWQ),
    "awq, one kind of matrix left alone": lambda d: write_quantized(d, LlamaConfig, quantizers.awq, AWQ, left_alone="mlp.down_proj"),
    "eight bits in words": lambda d: write_quantized(d, LlamaConfig, partial(quantizers.int8, group=32), pack_quantized(num_bits=8)),
    "eight bits, by row": lambda d: write_quantized(
        d, LlamaConfig, partial(quantizers.int8, in_words=False),
        pack_quantized(num_bits=8, strategy="channel", group_size=None) | {"format": "int-quantized"},
    ),
    "qwen3-moe, eight bits": lambda d: write_quantized(
        d, Qwen3MoeConfig, quantizers.int8, pack_quantized(num_bits=8, strategy="channel", group_size=None),
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True,
    ),
    "qwen3-moe, awq": lambda d: write_quantized(
        d, Qwen3MoeConfig, quantizers.awq, AWQ, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "mixtral, compressed-tensors": lambda d: write_quantized(
        d, MixtralConfig, quantizers.compressed_tensors, pack_quantized(), num_local_experts=3, num_experts_per_tok=2
    ),
    "deepseek-v3, compressed-tensors": lambda d: write_quantized(
        d, DeepseekV3Config, quantizers.compressed_tensors, pack_quantized(), **DEEPSEEK
    ),
    "deepseek-v3, compressed-tensors, attention plain": lambda d: write_quantized(
        d, DeepseekV3Config, quantizers.compressed_tensors, pack_quantized(), left_alone="self_attn", **DEEPSEEK
    ),
    "llama4, compressed-tensors": lambda d: write_quantized(
        d, Llama4TextConfig, quantizers.compressed_tensors, pack_quantized(), **SCOUT
    ),
    "phi3, fused, compressed-tensors": lambda d: write_quantized(
        d, Phi3Config, quantizers.compressed_tensors, pack_quantized(), head_dim=None, sliding_window=None
    ),
    "minimax-m2, awq": lambda d: write_quantized(
        d, MiniMaxM2Config, quantizers.awq, AWQ, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2
    ),
    "falcon-h1, gptq": lambda d: write_quantized(
        d, FalconH1Config, quantizers.gptq, GPTQ, **sizes_for_groups("falcon-h1") | {"mamba_d_state": 8}
    ),
    "kimi-linear, awq": lambda d: write_quantized(
        d, KimiLinearConfig, quantizers.awq, AWQ, **sizes_for_groups("kimi-linear") | {"linear_num_heads": 8}
    ),
    "qwen2-moe, gptq": lambda d: write_quantized(
        d, Qwen2MoeConfig, quantizers.gptq, GPTQ, head_dim=None, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
}  # fmt: skip
FP8: dict[str, Callable[[Path], PreTrainedModel]] = {
    "compressed-tensors, one scale": lambda d: write_quantized(
        d, LlamaConfig, quantizers.fp8, pack_quantized(num_bits=8, type="float", strategy="tensor", group_size=None)
    ),
    "compressed-tensors, by row": lambda d: write_quantized(
        d, LlamaConfig, partial(quantizers.fp8, by_row=True), pack_quantized(num_bits=8, type="float", strategy="channel", group_size=None)
    ),
    "fp8 by blocks": lambda d: write_quantized(
        d, LlamaConfig, partial(quantizers.fp8, block=(128, 128), name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        hidden_size=192, intermediate_size=320,
    ),
    "qwen3-moe, fp8 by blocks": lambda d: write_quantized(
        d, Qwen3MoeConfig, partial(quantizers.fp8, block=(128, 128), name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    ),
    "deepseek-v3, fp8 by blocks": lambda d: write_quantized(
        d, DeepseekV3Config, partial(quantizers.fp8, block=(128, 128), name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, **DEEPSEEK | {"hidden_size": 192, "intermediate_size": 320},
    ),
    "phi3, fused, one scale": lambda d: write_quantized(
        d, Phi3Config, quantizers.fp8, pack_quantized(num_bits=8, type="float", strategy="tensor", group_size=None),
        head_dim=None, sliding_window=None,
    ),
    "phi3, fused, by row": lambda d: write_quantized(
        d, Phi3Config, partial(quantizers.fp8, by_row=True), pack_quantized(num_bits=8, type="float", strategy="channel", group_size=None),
        head_dim=None, sliding_window=None,
    ),
    "minimax-m2, fp8 by blocks": lambda d: write_quantized(
        d, MiniMaxM2Config, partial(quantizers.fp8, block=(128, 128), name="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [128, 128]}, hidden_size=192, intermediate_size=160, num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "nemotron-h, modelopt": lambda d: write_quantized(
        d, NemotronHConfig, quantizers.fp8, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        **sizes_for_groups("nemotron-h"),
    ),
    "llama4, fp8 by row": lambda d: write_quantized(
        d, Llama4TextConfig, partial(quantizers.fp8, by_row=True),
        pack_quantized(num_bits=8, type="float", strategy="channel", group_size=None), **SCOUT
    ),
}  # fmt: skip

FAMILIES = {name: row for name, row in (MODELS | FURTHER).items() if name != "gpt-oss"}  # published in MXFP4
FORMS: dict[str, tuple[quantizers.Quantizer, dict[str, Any]]] = {
    "int4": (quantizers.compressed_tensors, pack_quantized()),
    "int8": (quantizers.int8, pack_quantized(num_bits=8, strategy="channel", group_size=None)),
    "fp8": (partial(quantizers.fp8, by_row=True), pack_quantized(num_bits=8, type="float", strategy="channel", group_size=None)),
}  # fmt: skip


_HEADS = {"head_dim": 16, "v_head_dim": 8, "mamba_head_dim": 8, "linear_head_dim": 32, "linear_value_head_dim": 8}


def sizes_for_groups(name: str) -> dict[str, Any]:
    """Return a family's settings with matrices whose columns are groups of 32."""
    sizes = {"num_hidden_layers": 4} | FAMILIES[name][1]
    rounded = ("hidden_size", "intermediate_size", "latent_size", "d_ssm", "_mlp")
    sizes |= {key: -(-sizes[key] // 32) * 32 for key in sizes if key.endswith(rounded) and sizes[key] is not True}
    sizes |= {key: size for key, size in _HEADS.items() if sizes.get(key)}
    return sizes | ({key: DEEPSEEK[key] for key in sizes if key in DEEPSEEK} if "kv_lora_rank" in sizes else {})


def keep_packed(monkeypatch: pytest.MonkeyPatch, is_kept: bool) -> None:
    for format in (Int4Format, Int8Format, Fp8Format, Mxfp4Format):
        monkeypatch.setattr(format, "stays_packed", lambda self, device: is_kept)


def skip_if_a_gpu_unpacks(name: str) -> None:
    if torch.cuda.is_available() and name == "qwen3-moe, eight bits":
        pytest.skip("experts in eight bits are unpacked on a GPU")


@pytest.mark.parametrize("name", INTEGERS | FP8)
def test_a_quantized_checkpoint_unpacked_is_the_model_that_its_numbers_stand_for(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (INTEGERS | FP8)[name](tmp_path)
    keep_packed(monkeypatch, False)
    prompt = random_prompt(37, seed=3)
    heard = one(load_engine(tmp_path, dtype="float32"), full("a", prompt, max_tokens=4, num_prompt_logprobs=431))
    assert_agrees(model, prompt, heard)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_every_form_is_the_model_that_its_numbers_stand_for(
    tmp_path: Path, name: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantizer, described = FORMS[form]
    model = write_quantized(tmp_path, FAMILIES[name][0], quantizer, described, **sizes_for_groups(name))
    prompt = random_prompt(37, seed=3)
    for is_kept in (False,) if form == "fp8" else (False, True):
        keep_packed(monkeypatch, is_kept)
        engine = load_engine(tmp_path, dtype="float32")
        assert bool(packed_weights(engine)) == is_kept
        assert_agrees(model, prompt, one(engine, full("a", prompt, max_tokens=4, num_prompt_logprobs=431)))


@pytest.mark.parametrize("name", INTEGERS)
def test_a_quantized_checkpoint_kept_packed_is_the_same_model(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_if_a_gpu_unpacks(name)
    model = INTEGERS[name](tmp_path)
    keep_packed(monkeypatch, True)
    if "left alone" in name:  # the checkpoint has kinds of matrices that are not quantized, so they are not packed
        assert packed_weights(load_engine(tmp_path, dtype="float32")) == 2 * 3 + 3
        return
    prompt = random_prompt(37, seed=3)
    engine = load_engine(tmp_path, dtype="float32")
    assert packed_weights(engine)
    assert_agrees(model, prompt, one(engine, full("a", prompt, max_tokens=4, num_prompt_logprobs=431)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensor cores add up FP8 products with 14 bits")
@pytest.mark.parametrize("name", FP8)
def test_fp8_kept_packed_is_the_same_model_with_rounded_activations(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FP8[name](tmp_path)
    for part, module in model.named_modules():
        # Inputs of experts, and of matrices that are not multiplied in packed form, are not rounded.
        if isinstance(module, torch.nn.Linear) and part.endswith("_proj") and not part.endswith("kv_b_proj"):
            module.register_forward_pre_hook(lambda _, inputs: (quantizers.fp8_rounded(inputs[0]),))
    keep_packed(monkeypatch, True)
    prompt = random_prompt(37, seed=3)
    engine = load_engine(tmp_path, dtype="float32")
    assert packed_weights(engine)
    assert_agrees(model, prompt, one(engine, full("a", prompt, max_tokens=1, num_prompt_logprobs=431)))


@pytest.mark.parametrize("name", [*INTEGERS, *FP8])
def test_a_quantized_checkpoint_is_mapped_as_it_was_loaded(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (INTEGERS | FP8)[name](tmp_path / "model")
    keep_packed(monkeypatch, False)
    memory = make_kv_memory(HostConfig(kv_bytes=4 << 20, threads=1))
    _, expected = answer(tmp_path / "model", None, memory, "float32")
    made, first = answer(tmp_path / "model", tmp_path / "kept", memory, "float32")
    mapped, second = answer(tmp_path / "model", tmp_path / "kept", memory, "float32")
    assert (made.mapped, mapped.mapped) == (False, True)
    assert first.logprobs == second.logprobs == expected.logprobs
    pack_directory(tmp_path / "model", tmp_path / "packed", "float32", Report())
    assert answer(tmp_path / "packed", None, memory, "float32")[1].logprobs == expected.logprobs


@pytest.mark.parametrize("name", ["awq", "gptq, scattered", "fp8 by blocks", "qwen3-moe, fp8 by blocks", "mxfp4"])
def test_weights_that_stay_packed_are_kept_as_the_checkpoint_has_them(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family(tmp_path / "model", PACKED) if name == "mxfp4" else (INTEGERS | FP8)[name](tmp_path / "model")
    keep_packed(monkeypatch, True)
    memory = make_kv_memory(HostConfig(kv_bytes=4 << 20, threads=1))
    _, expected = answer(tmp_path / "model", None, memory, "float32")
    made, first = answer(tmp_path / "model", tmp_path / "kept", memory, "float32")
    stored = sum(tensor.end - tensor.start for tensor in index_checkpoint(tmp_path / "model").values())
    assert 0.95 * stored < made.weights_bytes < 1.05 * stored
    forbid_checkpoints(monkeypatch)
    mapped, second = answer(tmp_path / "model", tmp_path / "kept", memory, "float32")
    assert (made.mapped, mapped.mapped) == (False, True)
    assert mapped.weights_bytes == made.weights_bytes
    assert first.logprobs == second.logprobs == expected.logprobs


def test_a_copy_in_memory_that_is_damaged_or_of_another_kind_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    INTEGERS["awq"](tmp_path / "model")
    memory = make_kv_memory(HostConfig(kv_bytes=4 << 20, threads=1))
    kept = tmp_path / "kept"
    keep_packed(monkeypatch, False)
    _, unpacked = answer(tmp_path / "model", kept, memory, "float32")
    keep_packed(monkeypatch, True)
    remade, packed = answer(tmp_path / "model", kept, memory, "float32")
    assert not remade.mapped
    assert "it holds float32, not tensors as the checkpoint has them" in caplog.text
    with kept.open("r+b") as file:
        file.truncate(kept.stat().st_size - 100)
    remade, again = answer(tmp_path / "model", kept, memory, "float32")
    assert not remade.mapped
    assert "cut off" in caplog.text
    assert again.logprobs == packed.logprobs
    keep_packed(monkeypatch, False)
    remade, last = answer(tmp_path / "model", kept, memory, "float32")
    assert not remade.mapped
    assert last.logprobs == unpacked.logprobs


def test_packed_weights_are_loaded_without_a_copy_where_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    INTEGERS["awq"](tmp_path / "model")
    keep_packed(monkeypatch, True)
    memory = make_kv_memory(HostConfig(kv_bytes=4 << 20, threads=1))
    _, expected = answer(tmp_path / "model", None, memory)
    full_file_system(monkeypatch)
    info, heard = answer(tmp_path / "model", tmp_path / "kept", memory)
    assert (info.mapped, (tmp_path / "kept").exists()) == (False, False)
    assert heard.logprobs == expected.logprobs
    assert "MiB free" in caplog.text


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["awq", "eight bits, by row", "mxfp4", "fp8 by blocks"])
def test_a_cpu_keeps_what_its_c_library_multiplies_by(tmp_path: Path, name: str) -> None:
    write_family(tmp_path, PACKED) if name == "mxfp4" else (INTEGERS | FP8)[name](tmp_path)
    takes_codes = library.takes_codes()
    assert bool(packed_weights(load_engine(tmp_path, dtype="float32"))) == (takes_codes and "fp8" not in name)
    with computing_with(TORCH):
        assert not packed_weights(load_engine(tmp_path, dtype="float32"))


def test_experts_in_mxfp4_kept_packed_are_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_family(tmp_path, PACKED)
    keep_packed(monkeypatch, True)
    prompt = random_prompt(60, seed=4)
    engine = load_engine(tmp_path, dtype="float32")
    assert packed_weights(engine) == 2 * 3
    assert_agrees(model, prompt, one(engine, full("a", prompt, max_tokens=4, num_prompt_logprobs=431)))


def test_an_mxfp4_scale_that_is_no_number_is_named_where_it_stays_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family(tmp_path, PACKED)
    name = "model.layers.2.mlp.experts.down_proj_scales"
    change_tensors(tmp_path, lambda tensors: tensors[name].view(-1)[5:6].fill_(255))
    keep_packed(monkeypatch, True)
    with pytest.raises(CheckpointError, match=f"{name} in model.safetensors holds NaN"):
        load_engine(tmp_path, dtype="float32")


@pytest.mark.parametrize("name", [*INTEGERS, *FP8, "mxfp4"])
@pytest.mark.parametrize("stays_packed", [True, False])
def test_a_rehearsal_lays_out_what_the_load_does(
    tmp_path: Path, name: str, stays_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A different layout in the dry run would compile other kernels than are launched."""
    if stays_packed:
        skip_if_a_gpu_unpacks(name)
    write_family(tmp_path, PACKED) if name == "mxfp4" else (INTEGERS | FP8)[name](tmp_path)
    keep_packed(monkeypatch, stays_packed)
    raw = read_config(tmp_path)
    family = find_family(raw)
    config: Any = family.parse_config(raw)
    storage, format = MetaStorage.open(tmp_path, config.fused), read_format(raw)
    cache = CacheLayout(config.cached_layers, 16, torch.float32)
    rehearsed = lay_out(
        DryRun(
            family, config, storage, torch.float32, 64, cache,
            format=format, stays_packed=stays_packed,
        )
    )  # fmt: skip
    loaded = runner_of(load_engine(tmp_path, dtype="float32")).model
    assert any(not isinstance(weight, PlainWeight) for weight in matrices(loaded)) == stays_packed
    assert [layout(weight) for weight in matrices(rehearsed)] == [layout(weight) for weight in matrices(loaded)]


def layout(weight: Any) -> Any:
    """Return the properties of a weight that decide which kernel is launched and how it is compiled.

    The order of columns does not belong to these: it is undone before the launch.
    """
    if isinstance(weight, torch.Tensor):
        strides = [step for step, size in zip(weight.stride(), weight.shape, strict=True) if size > 1]
        return weight.dtype, tuple(weight.shape), strides
    parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
    parts.pop("permutation", None)
    return type(weight), {part: layout(x) if isinstance(x, torch.Tensor) else x for part, x in parts.items()}


def packed_weights(engine: Any) -> int:
    """Return the number of packed matrices in the model."""
    return sum(not isinstance(weight, PlainWeight) for weight in matrices(runner_of(engine).model))


def matrices(model: Any) -> list[Any]:
    of_layers = [linear.weight for layer in model.layers for linear in projections(layer.attention)]
    for mlp in (
        getattr(layer.feed_forward, "sparse", layer.feed_forward)
        for layer in model.layers
        if layer.feed_forward is not None
    ):
        of_layers += (
            [mlp.gate_up_proj.weight, mlp.down_proj.weight]
            if hasattr(mlp, "down_proj")
            else [mlp.experts.gate_up, mlp.experts.down]
        )
    return of_layers


def projections(attention: Any) -> list[Linear]:
    if attention is None:
        return []
    if isinstance(attention, JoinedMixers):
        return projections(attention.attention) + projections(attention.recurrent)
    if isinstance(attention, LatentAttention):
        queries = attention.queries
        return [queries.down_proj, queries.proj, attention.latent_proj, attention.o_proj]
    return [part for part in vars(attention).values() if isinstance(part, Linear)]


STEM = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "part", "change", "words"),
    [
        ("awq", "qzeros", lambda x: x[:-1], r"qzeros in model.safetensors has shape \[1, 8\], but config.json makes it \[2, 8\]"),
        ("awq", "qweight", lambda x: x.half(), "qweight in model.safetensors has type F16; supported are I32"),
        ("awq", "scales", lambda x: x.fill_(torch.nan), "scales in model.safetensors holds NaN"),
        ("gptq", "g_idx", lambda x: x.clamp(max=0), "g_idx does not put 32 columns into each of 2 groups"),
        ("gptq", "scales", None, "scales is missing"),
        ("compressed-tensors", "weight_scale", None, "weight_scale is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_packed_tensor_is_said_with_its_name(
    tmp_path: Path, name: str, part: str, change: Any, words: str
) -> None:
    INTEGERS[name](tmp_path)
    tensor = f"{STEM}.{part}"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        stored = tensors.pop(tensor)
        if change is not None:
            tensors[tensor] = change(stored).contiguous()

    change_tensors(tmp_path, damage)
    with pytest.raises(CheckpointError, match=f"{STEM}.{words}"):
        load_engine(tmp_path, dtype="float32")


def test_an_fp8_value_that_is_no_number_is_named(tmp_path: Path) -> None:
    FP8["compressed-tensors, by row"](tmp_path)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{STEM}.weight"].view(torch.uint8)[3, 5] = 0x7F

    change_tensors(tmp_path, damage)
    with pytest.raises(CheckpointError, match=rf"{STEM}.weight in model.safetensors holds NaN"):
        load_engine(tmp_path, dtype="float32")


def test_matrices_that_cannot_be_one_packed_matrix_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three matrices with the same input has another order of columns, so they cannot form one packed matrix."""
    INTEGERS["gptq, scattered"](tmp_path)
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{STEM}.g_idx": torch.arange(64).int() // 32}))
    keep_packed(monkeypatch, False)
    prompt = random_prompt(9, seed=1)
    unpacked = one(load_engine(tmp_path, dtype="float32"), full("a", prompt, max_tokens=1)).logprobs
    keep_packed(monkeypatch, True)
    engine = load_engine(tmp_path, dtype="float32")
    every = matrices(runner_of(engine).model)
    assert packed_weights(engine) == len(every) - 1
    packed = one(engine, full("a", prompt, max_tokens=1)).logprobs
    assert [one.logprob for one in packed] == pytest.approx([one.logprob for one in unpacked], rel=1e-4)

    INTEGERS["awq"](tmp_path / "other")
    plain = torch.randn(64, 64) / 8

    def leave_alone(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{STEM}.{part}"]
        tensors[f"{STEM}.weight"] = plain

    change_tensors(tmp_path / "other", leave_alone)
    assert packed_weights(load_engine(tmp_path / "other", dtype="float32")) == len(every) - 1


def test_biases_that_a_quantizer_adds_are_added(tmp_path: Path) -> None:
    model = INTEGERS["gptq"](tmp_path)
    prompt = random_prompt(9, seed=1)
    plain = one(load_engine(tmp_path, dtype="float32"), full("a", prompt, max_tokens=1)).logprobs
    matrices = [name.removesuffix(".weight") for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    biases = {f"{name}.bias": torch.zeros(len(model.get_parameter(f"{name}.weight"))) for name in matrices}
    change_tensors(tmp_path, lambda tensors: tensors.update(biases))
    assert one(load_engine(tmp_path, dtype="float32"), full("a", prompt, max_tokens=1)).logprobs == plain
    biases["model.layers.0.mlp.down_proj.bias"] += 1.0
    change_tensors(tmp_path, lambda tensors: tensors.update(biases))
    assert one(load_engine(tmp_path, dtype="float32"), full("a", prompt, max_tokens=1)).logprobs != plain


@pytest.mark.parametrize(
    ("described", "words"),
    [
        (GPTQ | {"bits": 8}, "bits = 8; supported for gptq is 4"),
        (GPTQ | {"group_size": 0}, "group_size = 0; it must be positive"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'; supported are gptq and gptq_v2"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'; supported for awq is 'gemm'"),
        (pack_quantized(num_bits=3), "'pack-quantized' with 3 bits of type 'int' by 'group'; supported are"),
        (
            pack_quantized(num_bits=8, symmetric=False),
            "'pack-quantized' with 8 bits of type 'int' by 'group'; supported are",
        ),
        (pack_quantized() | {"config_groups": {}}, "no config_groups with weights"),
        ({"quant_method": "fp8", "weight_block_size": [128, 100]}, r"blocks of \[128, 100\]; they must be"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "blocks of 128; they must be"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            "quant_algo = 'NVFP4'; supported for modelopt are FP8 and",
        ),
    ],
)
def test_a_format_that_no_kernel_computes_is_refused_with_its_words(described: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_format({"quantization_config": described})


def test_groups_that_do_not_divide_a_row_are_refused(tmp_path: Path) -> None:
    INTEGERS["awq"](tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"]["group_size"] = 128
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(CheckpointError, match="has 64 columns in groups of 128; a group must divide them"):
        load_engine(tmp_path, dtype="float32")
