"""A new weight format needs only the code in this file: matrices, head and embeddings in it work like any others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.weights.formats.format import Index, WeightFormat, WeightRequests, stacked_name
from pilotlight.engine.weights.formats.weight_formats import FORMATS
from pilotlight.engine.weights.shard import MatrixPart
from pilotlight.engine.weights.stored_tensor import ExpectedTensor
from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.matrices.weight import Weight
from tests.engine.agreement import assert_agrees, full
from tests.engine.driver import load_engine, one, random_prompt
from tests.engine.quantizers import Parts, write_quantized
from tests.engine.test_mapped_weights import answer

CONFIG = {"quant_method": "eight-bit", "offset": 128}


@dataclass(frozen=True, slots=True)
class EightBitWeight(Weight):
    of_rows = ("codes", "scales")
    codes: Tensor  # [..., rows, columns] uint8
    scales: Tensor  # [..., rows, 1]
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.unpack(x.dtype), bias)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return ((self.codes.float() - self.offset) * self.scales).to(dtype)

    def require(self, check: ArgumentCheck, name: str, shape: str, dtype: torch.dtype) -> None:
        check.tensor(f"{name}.codes", self.codes, shape, (torch.uint8,))


@dataclass(frozen=True, slots=True)
class EightBitFormat(WeightFormat):
    offset: int
    is_kept: bool = True

    def stays_packed(self, device: torch.device) -> bool:
        return self.is_kept

    def holds(self, index: Index, name: str) -> bool:
        return f"{name}.codes" in index

    def fill(self, loader: WeightRequests, part: MatrixPart, into: Tensor) -> None:
        def unpack(into: Tensor, codes: Tensor, scales: Tensor) -> None:
            into.copy_(EightBitWeight(codes, scales, self.offset).unpack(into.dtype))

        loader.fill(into, self._stored(part), unpack)

    def lay_out(self, loader: WeightRequests, parts: Sequence[MatrixPart], experts: int) -> EightBitWeight:
        name, sizes = stacked_name([part.name for part in parts]), [part.rows.size for part in parts]
        codes = loader.take(f"{name}.codes", (sum(sizes), parts[0].columns.size), torch.uint8)
        scales = loader.take(f"{name}.scales", (sum(sizes), 1), torch.float32)
        for part, *into in zip(parts, codes.split(sizes), scales.split(sizes), strict=True):
            for place, stored in zip(into, self._stored(part), strict=True):
                loader.fill(place, [stored], None)
        return EightBitWeight(codes, scales, self.offset)

    def _stored(self, part: MatrixPart) -> list[ExpectedTensor]:
        codes = ExpectedTensor.of(f"{part.name}.codes", (part.rows, part.columns), ("U8",))
        return [codes, ExpectedTensor.of(f"{part.name}.scales", (part.rows, 1), ("F32",))]


def eight_bit(weight: Tensor) -> Parts:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = ((weight / scales).round() + 128).to(torch.uint8)
    return {"codes": codes, "scales": scales}, (codes.float() - 128) * scales


def read_eight_bit(described: Mapping[str, Any]) -> EightBitFormat:
    return EightBitFormat(described["offset"])


def read_to_unpack(described: Mapping[str, Any]) -> EightBitFormat:
    return EightBitFormat(described["offset"], is_kept=False)


@pytest.fixture(params=[True, False], ids=["kept packed", "unpacked"])
def is_kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    read = read_eight_bit if request.param else read_to_unpack
    monkeypatch.setitem(FORMATS, "eight-bit", f"{__name__}:{read.__name__}")
    return bool(request.param)


def quantize_ends(directory: Path, model: PreTrainedModel) -> None:
    """Quantize the embedding and the head of a written checkpoint too."""
    tensors = load_file(directory / "model.safetensors")
    parameters = dict(model.named_parameters())
    for name in ("model.embed_tokens", "lm_head"):
        parts, values = eight_bit(tensors.pop(f"{name}.weight"))
        tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        parameters[f"{name}.weight"].data.copy_(values)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("kind", ["llama", "mixture"])
def test_a_format_of_its_own_serves_the_right_tokens(tmp_path: Path, is_kept: bool, kind: str) -> None:
    if kind == "mixture" and is_kept and torch.cuda.is_available():
        pytest.skip("experts of such a format are unpacked on a GPU")
    if kind == "llama":
        model = write_quantized(tmp_path, LlamaConfig, eight_bit, CONFIG)
        quantize_ends(tmp_path, model)
    else:
        model = write_quantized(
            tmp_path, Qwen3MoeConfig, eight_bit, CONFIG, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
            norm_topk_prob=True,
        )  # fmt: skip
    engine = load_engine(tmp_path, dtype="float32")
    weights = [layer.attention.o_proj.weight for layer in engine.runner.model.layers]  # type: ignore[attr-defined]
    assert all(isinstance(weight, EightBitWeight) == is_kept for weight in weights)
    prompt = random_prompt(37, seed=3)
    assert_agrees(model, prompt, one(engine, full("a", prompt, max_tokens=4, num_prompt_logprobs=431)))


@pytest.mark.usefixtures("is_kept")
def test_it_is_kept_in_memory_and_found_again(tmp_path: Path) -> None:
    quantize_ends(tmp_path / "model", write_quantized(tmp_path / "model", LlamaConfig, eight_bit, CONFIG))
    memory = make_kv_memory(HostConfig(kv_bytes=4 << 20, threads=1))
    _, expected = answer(tmp_path / "model", None, memory)
    made, first = answer(tmp_path / "model", tmp_path / "kept", memory)
    mapped, second = answer(tmp_path / "model", tmp_path / "kept", memory)
    assert (made.mapped, mapped.mapped) == (False, True)
    assert first.logprobs == second.logprobs == expected.logprobs


@pytest.mark.usefixtures("is_kept")
def test_what_is_wrong_with_its_tensors_is_said_with_their_names(tmp_path: Path) -> None:
    write_quantized(tmp_path, LlamaConfig, eight_bit, CONFIG)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.scales"][3] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj.scales in model.safetensors holds NaN"):
        load_engine(tmp_path, dtype="float32")


def test_an_unknown_format_is_refused_by_name(tmp_path: Path) -> None:
    write_quantized(tmp_path, LlamaConfig, eight_bit, CONFIG)
    with pytest.raises(CheckpointError, match=r"quantized \(eight-bit\); supported for LlamaForCausalLM are float32"):
        load_engine(tmp_path, dtype="float32")
