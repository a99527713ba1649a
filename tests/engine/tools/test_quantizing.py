"""Quantizing: the result conforms to compressed-tensors, is as close to the original as its bits allow, and can be served."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, MixtralConfig, Qwen3Config

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.directory import directory_of
from pilotlight.engine.planning.model_plan import read_model
from pilotlight.engine.planning.parallelism import Parallelism, RankPlace
from pilotlight.engine.tools.calibration import observe
from pilotlight.engine.tools.packing import Report
from pilotlight.engine.tools.quantizing import Rounding, main, quantize_directory
from pilotlight.engine.tools.rounding import choose_scales, compensate, pack_words, round_to_codes
from tests.checkpoints import write_checkpoint, write_tokenizer
from tests.engine.agreement import assert_agrees, full
from tests.engine.driver import load_engine, one, random_prompt
from tests.engine.families import PACKED, config, write_family
from tests.engine.gguf.files import write_both
from tests.full_disk import files_of_at_most

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROJECTIONS = (*(f"self_attn.{part}" for part in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
INT4, INT8 = Rounding(4, 32), Rounding(8, None)


def read(stored: dict[str, torch.Tensor], stem: str, bits: int) -> torch.Tensor:
    """Return a matrix, unpacked by the description of compressed-tensors."""
    words, scales = stored[f"{stem}.weight_packed"], stored[f"{stem}.weight_scale"].double()
    columns = int(stored[f"{stem}.weight_shape"][1])
    unsigned, per_word = words.long() & 0xFFFFFFFF, 32 // bits
    codes = torch.stack([unsigned >> (bits * i) & (1 << bits) - 1 for i in range(per_word)], -1).flatten(1)[:, :columns]
    return (codes - (1 << (bits - 1))).double() * scales.repeat_interleave(columns // scales.shape[1], 1)


@pytest.mark.parametrize(
    ("rounding", "most"), [(INT4, 0.13), (Rounding(4, 64), 0.14), (INT8, 0.01), (Rounding(8, 32), 0.007)]
)
def test_values_are_as_near_as_their_bits_allow_and_serve(tmp_path: Path, rounding: Rounding, most: float) -> None:
    model = write_checkpoint(tmp_path / "model", config(LlamaConfig, **(SIZES | {"intermediate_size": 192})))
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    out = quantize_directory(tmp_path / "model", tmp_path / "out", rounding, Report())
    before, after = load_file(tmp_path / "model" / "model.safetensors"), load_file(out / "model.safetensors")
    parameters, matrices = dict(model.named_parameters()), 0
    for name, weight in before.items():
        stem = name.removesuffix(".weight")
        if name in after:
            assert torch.equal(after[name], weight)
            assert not name.endswith("_proj.weight")
            continue
        matrices += 1
        values = read(after, stem, rounding.bits)
        assert (values - weight).norm() < most * weight.norm()
        parameters[name].data.copy_(values)
    assert matrices == 3 * 7
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert described["ignore"] == ["lm_head", "model.embed_tokens"]
    assert (out / "chat_template.jinja").exists()
    prompt = random_prompt(37, seed=3)
    heard = one(load_engine(out, dtype="float32"), full("a", prompt, max_tokens=4, num_prompt_logprobs=431))
    assert_agrees(model, prompt, heard)


def test_experts_are_rounded_and_routers_are_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", config(MixtralConfig, **SIZES, num_local_experts=3, num_experts_per_tok=2))
    out = quantize_directory(tmp_path / "model", tmp_path / "out", INT4, Report())
    after = load_file(out / "model.safetensors")
    assert sum(".experts." in name and name.endswith("weight_packed") for name in after) == 3 * 3 * 3
    assert sum(name.endswith("gate.weight") for name in after) == 3
    one(load_engine(out, dtype="float32"), full("a", random_prompt(9, seed=3), max_tokens=2))


def test_a_large_checkpoint_is_written_in_several_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", config(LlamaConfig, **SIZES))
    whole = quantize_directory(tmp_path / "model", tmp_path / "whole", INT4, Report())
    parts = quantize_directory(tmp_path / "model", tmp_path / "parts", INT4, Report(), file_bytes=50_000)
    assert len(list(parts.glob("model-*-of-*.safetensors"))) > 2
    asked = full("a", random_prompt(9, seed=3), max_tokens=2)
    assert (
        one(load_engine(parts, dtype="float32"), asked).logprobs
        == one(load_engine(whole, dtype="float32"), asked).logprobs
    )


def test_a_matrix_whose_columns_no_group_divides_stays_as_it_is(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", config(LlamaConfig, **(SIZES | {"intermediate_size": 100})))
    out = quantize_directory(tmp_path / "model", tmp_path / "out", INT4, Report())
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.down_proj" in described["ignore"]
    one(load_engine(out, dtype="float32"), full("a", random_prompt(9, seed=3), max_tokens=2))


def test_zeros_and_numbers_at_the_ends_are_rounded_to_themselves() -> None:
    weight = torch.zeros(2, 64)
    weight[1] = torch.tensor([1.0, -1.0] * 32)
    for bits in (4, 8):
        scales = choose_scales(weight, bits, 32, torch.bfloat16)
        assert (scales > 0).all()
        codes = round_to_codes(weight, scales, bits)
        assert (codes[0] == 0).all()
        assert torch.equal(codes[1].sign().float(), weight[1])
        assert pack_words(codes, bits).shape == (2, 64 * bits // 32)


def test_rounding_by_columns_loses_less_of_such_inputs_than_the_nearest_codes() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 128, generator=generator)
    mixed = torch.randn(128, 128, generator=generator) @ torch.diag(torch.logspace(0, -2, 128))
    inputs = torch.randn(1000, 128, generator=generator) @ mixed.T
    for group in (32, 128):
        nearest = choose_scales(weight, 4, group, torch.bfloat16)
        codes, scales = compensate(weight, inputs.T @ inputs, 4, group, torch.bfloat16)
        lost = [
            (inputs @ (values.float() * of.float().repeat_interleave(group, 1) - weight).T).norm()
            for values, of in ((codes, scales), (round_to_codes(weight, nearest, 4), nearest))
        ]
        assert lost[0] < 0.6 * lost[1]


def test_inputs_that_say_nothing_of_each_other_give_the_nearest_codes() -> None:
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(3))
    codes, scales = compensate(weight, torch.zeros(96, 96), 4, 32, torch.bfloat16)
    assert torch.equal(scales, choose_scales(weight, 4, 32, torch.bfloat16))
    assert torch.equal(codes, round_to_codes(weight, scales, 4))


def test_a_text_calibrates_what_is_rounded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", config(LlamaConfig, **SIZES))
    write_tokenizer(tmp_path / "model")
    text = "the pilot light of a gas stove burns small and blue until somebody wants a hot meal " * 40  # data
    seen: list[tuple[int, int]] = []
    names = {f"model.layers.{i}.{part}_proj" for i in range(3) for part in PROJECTIONS}
    sums = observe(tmp_path / "model", text, names, lambda done, total: seen.append((done, total)))
    assert set(sums) == names
    assert sums["model.layers.0.self_attn.q_proj"] is sums["model.layers.0.self_attn.k_proj"]
    assert all(one.diagonal().sum() > 0 for one in sums.values())
    assert seen[-1][0] == seen[-1][1]
    plain = quantize_directory(tmp_path / "model", tmp_path / "plain", INT4, Report())
    out = quantize_directory(tmp_path / "model", tmp_path / "out", INT4, Report(), text)
    before, nearest, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", plain, out))
    for name, of in sums.items():
        lost = [
            torch.einsum("rc,cd,rd->", change, of.double(), change)
            for change in (read(stored, name, 4) - before[f"{name}.weight"] for stored in (after, nearest))
        ]
        assert lost[0] < lost[1]
    one(load_engine(out, dtype="float32"), full("a", random_prompt(9, seed=3), max_tokens=2))


def test_a_text_of_a_few_words_calibrates_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", config(LlamaConfig, **SIZES))
    write_tokenizer(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"the text to calibrate with has \d+ tokens; give 64 or more"):
        quantize_directory(tmp_path / "model", tmp_path / "out", INT4, Report(), "the pilot light")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "model", config(LlamaConfig, **SIZES))
    with files_of_at_most(30_000), pytest.raises(SystemExit):
        main([str(tmp_path / "model"), str(tmp_path / "out"), "--to", "int4"])
    assert "File too large" in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]


def test_what_cannot_be_quantized_is_refused_in_a_sentence(tmp_path: Path) -> None:
    write_family(tmp_path / "packed", PACKED)
    write_checkpoint(tmp_path / "model", config(LlamaConfig, **SIZES))
    write_checkpoint(tmp_path / "awkward", config(LlamaConfig))
    for name, rounding, words in (
        ("packed", INT4, "is quantized already: its config.json has a quantization_config"),
        ("awkward", INT4, "no matrix of .* has a multiple of 32 columns"),
        ("nowhere", INT4, "holds no config.json"),
    ):
        with pytest.raises(CheckpointError, match=words):
            quantize_directory(tmp_path / name, tmp_path / "out", rounding, Report())
    with pytest.raises(CheckpointError, match="holds a checkpoint already; choose another directory"):
        quantize_directory(tmp_path / "model", tmp_path / "model", INT4, Report())
    tensors = tmp_path / "model" / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is truncated"):
        quantize_directory(tmp_path / "model", tmp_path / "out", INT4, Report())


def test_a_plan_counts_the_bytes_that_a_cpu_keeps(tmp_path: Path) -> None:
    """The plan is for a CPU; a GPU unpacks eight-bit integers."""
    write_checkpoint(tmp_path / "model", config(LlamaConfig, **SIZES))
    for rounding in (INT4, INT8):
        out = quantize_directory(tmp_path / "model", tmp_path / str(rounding.bits), rounding, Report())
        planned = read_model(out, "float32", on_cpu=True)
        kept = sum(planned.weight_bytes(RankPlace(Parallelism()), on_cpu=True).values())
        stored = sum(
            t.nbytes for name, t in load_file(out / "model.safetensors").items() if not name.endswith("_shape")
        )
        assert kept == stored
        unpacked = sum(planned.weight_bytes(RankPlace(Parallelism()), on_cpu=False).values())
        assert (unpacked > kept) == (rounding is INT8)


def test_plain_numbers_of_a_gguf_file_are_rounded_as_those_of_its_checkpoint(tmp_path: Path) -> None:
    checkpoint, file = write_both(tmp_path, Qwen3Config, **SIZES)
    wanted = quantize_directory(checkpoint, tmp_path / "wanted", INT4, Report())
    found = quantize_directory(directory_of(file, tmp_path / "store"), tmp_path / "found", INT4, Report())
    expected, actual = (load_file(out / "model.safetensors") for out in (wanted, found))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    request = full("a", random_prompt(20, seed=3), max_tokens=4)
    assert one(load_engine(found), request).token_ids == one(load_engine(wanted), request).token_ids
