"""Parts of weights for ranks: for every kind of weight, the joined or summed results of the parts are those of the whole."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.shapes import AttentionShape, ExpertsShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.attention import Attention
from pilotlight.engine.layers.embedding import TokenEmbedding
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.mla.latent_attention import LatentAttention
from pilotlight.engine.layers.mlp import GatedMLP
from pilotlight.engine.layers.moe import Experts
from pilotlight.engine.models.model_registry import find_family
from pilotlight.engine.weights.checkpoint import Checkpoint, index_checkpoint
from pilotlight.engine.weights.config import read_config
from pilotlight.engine.weights.formats.weight_formats import read_format
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.shard import Shard
from pilotlight.engine.weights.storage import LayoutPlan
from pilotlight.kernels.elementwise.activation import silu_and_mul
from pilotlight.kernels.moe import moe_experts
from tests.engine import quantizers
from tests.engine.families import FURTHER, MODELS, PACKED, write_family
from tests.engine.quantizers import Parts, pack_quantized
from tests.engine.stored_weights import load, write_tensors
from tests.engine.test_quantized import AWQ, GPTQ


class Stored(NamedTuple):
    quantizer: Callable[[Tensor], Parts]
    described: dict[str, Any] | None


def plain(weight: Tensor) -> Parts:
    return {"weight": weight}, weight


FP8 = {"quant_method": "fp8"}
FORMATS = {
    "plain": Stored(plain, None),
    "compressed-tensors": Stored(quantizers.compressed_tensors, pack_quantized()),
    "compressed-tensors, zeros": Stored(partial(quantizers.compressed_tensors, symmetric=False), pack_quantized(symmetric=False)),
    "compressed-tensors, by row": Stored(
        partial(quantizers.compressed_tensors, group=None), pack_quantized(strategy="channel", group_size=None)
    ),
    "gptq": Stored(quantizers.gptq, GPTQ),
    "awq": Stored(quantizers.awq, AWQ),
    "fp8, one scale": Stored(quantizers.fp8, FP8),
    "fp8, by row": Stored(partial(quantizers.fp8, by_row=True), FP8),
    "fp8, by blocks": Stored(
        partial(quantizers.fp8, block=(96, 128), name="weight_scale_inv"), FP8 | {"weight_block_size": [96, 128]}
    ),
}  # fmt: skip
NOTHING: Any = None
NONE = Context(NOTHING)  # an empty context: the tested parts do not read the step, and ranks run one by one
SIZES = pytest.mark.parametrize("size", [2, 4])
KINDS = pytest.mark.parametrize("kind", FORMATS)
KEPT = pytest.mark.parametrize("keeps_packed", [True, False])


class Shared:
    """Matrices in one format that are written to a directory, then loaded whole and for every rank."""

    def __init__(self, directory: Path, kind: str, keeps_packed: bool = False) -> None:
        self._directory, self._keeps_packed = directory, keeps_packed
        self._stored = FORMATS[kind]
        self._tensors: dict[str, Tensor] = {}

    def write(self, name: str, rows: int, columns: int, bias: bool = False) -> None:
        parts, _ = self._stored.quantizer(torch.randn(rows, columns) / columns**0.5)
        self._tensors |= {f"{name}.{part}": tensor for part, tensor in parts.items() if part != "weight_shape"}
        if bias:
            self._tensors[f"{name}.bias"] = torch.randn(rows)

    def load(self, ask: Callable[[WeightLoader], Any], size: int) -> tuple[Any, list[Any]]:
        write_tensors(self._directory, self._tensors)
        format = read_format({"quantization_config": self._stored.described})
        each = partial(load, self._directory, ask, format, self._keeps_packed)
        return each(), [each(shard=Shard(rank, size)) for rank in range(size)]


@KINDS
@KEPT
@SIZES
def test_rows_are_joined(tmp_path: Path, kind: str, keeps_packed: bool, size: int) -> None:
    shared = Shared(tmp_path, kind, keeps_packed)
    shared.write("gate", 192, 256, bias=True)
    shared.write("up", 192, 256, bias=True)
    whole, ranks = shared.load(lambda loader: Linear.load(loader, ["gate", "up"], [192, 192], 256, True, "rows"), size)
    x = torch.randn(3, 256)
    gates, ups = zip(*(torch.chunk(rank(x, NONE), 2, dim=1) for rank in ranks), strict=True)
    torch.testing.assert_close(torch.cat([*gates, *ups], 1), whole(x, NONE), rtol=1e-5, atol=1e-5)
    assert all(rank.weight.shape == (384 // size, 256) for rank in ranks)
    if size == 2:  # of four ranks, two share a block of 96 rows, so its scale is stored twice
        assert sum(rank.weight.num_bytes for rank in ranks) <= whole.weight.num_bytes + 8


@KINDS
@KEPT
@SIZES
def test_columns_are_summed(tmp_path: Path, kind: str, keeps_packed: bool, size: int) -> None:
    shared = Shared(tmp_path, kind, keeps_packed)
    shared.write("down", 96, 512, bias=True)
    whole, ranks = shared.load(lambda loader: Linear.load(loader, ["down"], [96], 512, True, "columns"), size)
    x = torch.randn(3, 512)
    if "fp8" in kind:  # a rank rounds its inputs relative to their largest value
        x = x.sign() * 448.0
    parts = [rank(part.contiguous(), NONE) for rank, part in zip(ranks, x.chunk(size, dim=1), strict=True)]
    torch.testing.assert_close(sum(parts), whole(x, NONE), rtol=1e-5, atol=1e-3 if "fp8" in kind else 1e-5)
    assert [rank.bias is None for rank in ranks] == [False] + [True] * (size - 1)


@KINDS
@KEPT
def test_experts_are_shared_like_other_feed_forwards(tmp_path: Path, kind: str, keeps_packed: bool) -> None:
    shared, shape = Shared(tmp_path, kind, keeps_packed), ExpertsShape(3, 128, 512)
    for i in range(3):
        shared.write(f"experts.{i}.gate", 512, 128)
        shared.write(f"experts.{i}.up", 512, 128)
        shared.write(f"experts.{i}.down", 128, 512)
    whole, ranks = shared.load(lambda loader: Experts.load_each(loader, "experts", shape, ("gate", "up", "down")), 4)
    x, weights, ids = torch.randn(5, 128), torch.rand(5, 2), torch.rand(5, 3).argsort(1)[:, :2].contiguous()
    outputs = [moe_experts(x, weights, ids, of.gate_up, of.down, silu_and_mul) for of in (whole, *ranks)]
    torch.testing.assert_close(sum(outputs[1:]), outputs[0], rtol=1e-4, atol=1e-4)


@KINDS
@SIZES
def test_a_feed_forward_is_the_sum_of_its_parts(tmp_path: Path, kind: str, size: int) -> None:
    shared = Shared(tmp_path, kind)
    for name, rows, columns in (("gate", 512, 64), ("up", 512, 64), ("down", 64, 512)):
        shared.write(f"mlp.{name}_proj", rows, columns, bias=True)
    whole, ranks = shared.load(lambda loader: GatedMLP.load(loader, "mlp", 64, 512, bias=True), size)
    x = torch.randn(3, 64)
    torch.testing.assert_close(sum(rank(x, NONE) for rank in ranks), whole(x, NONE), rtol=1e-4, atol=1e-4)


@KINDS
def test_key_value_heads_are_held_by_several_ranks_where_there_are_fewer(tmp_path: Path, kind: str) -> None:
    shared, dim = Shared(tmp_path, kind), 128
    for name, rows, columns in (("q", 4 * dim, 64), ("k", 2 * dim, 64), ("v", 2 * dim, 64), ("o", 64, 4 * dim)):
        shared.write(f"attention.{name}_proj", rows, columns)
    shape = AttentionShape(4, 2, dim, 0.1)
    whole, ranks = shared.load(lambda loader: Attention.load(loader, "attention", 64, shape), 4)
    x = torch.randn(3, 64)
    q, k, v = whole.qkv_proj(x, NONE).split([4 * dim, 2 * dim, 2 * dim], dim=1)
    for i, rank in enumerate(ranks):
        assert rank.shape[:2] == (1, 1)
        expected = torch.cat([q.chunk(4, 1)[i], k.chunk(2, 1)[i // 2], v.chunk(2, 1)[i // 2]], 1)
        torch.testing.assert_close(rank.qkv_proj(x, NONE), expected, rtol=1e-5, atol=1e-5)


@SIZES
def test_a_vocabulary_is_shared_in_whole_units(tmp_path: Path, size: int) -> None:
    shared = Shared(tmp_path, "plain")
    shared.write("embed", 431, 24)
    whole, ranks = shared.load(lambda loader: TokenEmbedding.load(loader, "embed", 431, 24), size)
    hidden = torch.randn(2, 24)
    torch.testing.assert_close(torch.cat([rank.logits(hidden) for rank in ranks], 1), whole.logits(hidden))
    ids = torch.arange(431)
    assert torch.equal(torch.cat([rank(ids[: rank.weight.shape[0]], NONE) for rank in ranks]), whole(ids, NONE))


@pytest.mark.parametrize("is_packed", [False, True])
@SIZES
def test_experts_that_are_kept_in_one_tensor_are_shared(tmp_path: Path, size: int, is_packed: bool) -> None:
    experts, hidden, intermediate = 3, 64, 128
    if is_packed:
        stacks = {"gate_up": (experts, 2 * intermediate, hidden // 32), "down": (experts, hidden, intermediate // 32)}
        tensors = {
            f"{name}_{part}": torch.randint(low, high, (*shape, *rest), dtype=torch.uint8)
            for name, shape in stacks.items()
            for part, low, high, rest in (("blocks", 0, 256, (16,)), ("scales", 120, 125, ()))
        }
    else:
        tensors = {
            "gate_up": torch.randn(experts, hidden, 2 * intermediate),
            "down": torch.randn(experts, intermediate, hidden),
        }
    write_tensors(tmp_path, tensors)
    format = read_format({"quantization_config": {"quant_method": "mxfp4"}}) if is_packed else None

    def ask(loader: WeightLoader) -> Any:
        gate_up = loader.stack("gate_up", experts, 2 * intermediate, hidden, split="rows", are_pairs=True)
        return gate_up, loader.stack("down", experts, hidden, intermediate, split="columns")

    for keeps_packed in {False, is_packed}:
        each = partial(load, tmp_path, ask, format, keeps_packed)
        whole = [weight.unpack(torch.float32) for weight in each()]
        ranks = [[weight.unpack(torch.float32) for weight in each(shard=Shard(rank, size))] for rank in range(size)]
        gates, ups = zip(*(gate_up.chunk(2, 1) for gate_up, _ in ranks), strict=True)
        assert torch.equal(torch.cat([*gates, *ups], 1), whole[0])
        assert torch.equal(torch.cat([down for _, down in ranks], 2), whole[1])


def test_columns_in_an_order_of_importance_cannot_be_shared(tmp_path: Path) -> None:
    parts, _ = quantizers.gptq(torch.randn(64, 256), scattered=True)
    write_tensors(tmp_path, {f"down.{part}": tensor for part, tensor in parts.items()})
    format = read_format({"quantization_config": GPTQ})
    for keeps_packed in (True, False):
        with pytest.raises(
            CheckpointError, match=r"down has columns in an order of importance \(g_idx\), which ranks cannot"
        ):
            load(
                tmp_path,
                lambda loader: Linear.load(loader, ["down"], [64], 256, False, "columns"),
                format,
                keeps_packed,
                Shard(0, 2),
            )
    whole = load(tmp_path, lambda loader: Linear.load(loader, ["down"], [64], 256, False), format, True)
    ask = partial(load, tmp_path, lambda loader: Linear.load(loader, ["down"], [64], 256, False, "rows"), format, True)
    x = torch.randn(2, 256)
    joined = torch.cat([ask(Shard(rank, 2))(x, NONE) for rank in range(2)], 1)
    torch.testing.assert_close(joined, whole(x, NONE), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "columns", "size", "words"),
    [
        ("awq", 96, 2, "down: this rank's part, 0 to 48 of 96, cuts 32 columns under one scale"),
        ("fp8, by blocks", 256, 4, "down: this rank's part, 0 to 64 of 256, cuts 128 columns under one scale"),
        ("gptq", 3 * 32, 4, "cuts 32 columns under one scale"),
    ],
)
def test_a_part_that_cuts_a_group_is_refused_by_name(
    tmp_path: Path, kind: str, columns: int, size: int, words: str
) -> None:
    shared = Shared(tmp_path, kind)
    shared.write("down", 64, columns)
    with pytest.raises(CheckpointError, match=words):
        shared.load(lambda loader: Linear.load(loader, ["down"], [64], columns, False, "columns"), size)


def test_heads_that_ranks_cannot_share_evenly_are_refused() -> None:
    assert Shard(1, 4).heads((8, 2), "a") == [2, 1]
    for heads in ((6, 2), (12, 3)):
        with pytest.raises(
            CheckpointError, match=f"a has {heads[0]} heads and {heads[1]} key-value heads, which 4 ranks"
        ):
            Shard(0, 4).heads(heads, "a")
    assert Shard(3, 4).span(20, 10, "k", may_repeat=True) == (20, 10, 20)
    for total, may_repeat in ((30, True), (20, False)):
        with pytest.raises(
            CheckpointError, match=f"k has {total // 10} parts of 10, which 4 ranks cannot share evenly"
        ):
            Shard(0, 4).span(total, 10, "k", may_repeat=may_repeat)


def test_a_rank_reads_its_own_rows_where_they_lie_in_the_file(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"a.weight": torch.randn(64, 32), "b.weight": torch.randn(32, 64)})
    stored = index_checkpoint(tmp_path)
    plan = LayoutPlan(Checkpoint.open(tmp_path))
    loader = WeightLoader(plan, torch.float32, torch.device("meta"), shard=Shard(1, 2))
    loader.matrix(["a"], [64], 32, split="rows")
    loader.matrix(["b"], [32], 64, split="columns")
    (part,) = plan.in_files["a.weight"]
    assert (part.start, part.num_bytes) == (stored["a.weight"].start + 32 * 32 * 4, 32 * 32 * 4)
    assert "b.weight" not in plan.in_files


def test_what_no_rank_asks_for_is_refused_and_what_another_has_is_not(tmp_path: Path) -> None:
    shared = Shared(tmp_path, "plain")
    shared.write("down", 8, 16, bias=True)
    shared.load(lambda loader: Linear.load(loader, ["down"], [8], 16, True, "columns"), 2)
    with pytest.raises(CheckpointError, match=r"tensors that config.json's architecture does not have: down\.bias"):
        shared.load(lambda loader: Linear.load(loader, ["down"], [8], 16, False, "columns"), 2)


@pytest.mark.parametrize("name", [*MODELS, *FURTHER])
def test_ranks_of_every_family_ask_for_all_that_a_checkpoint_has(tmp_path: Path, name: str) -> None:
    write_family(tmp_path, name)
    raw = read_config(tmp_path)
    family = find_family(raw)
    config: Any = family.parse_config(raw)
    each = partial(load, tmp_path, lambda loader: family.load(config, loader, 64), read_format(raw), fused=config.fused)
    if getattr(config, "recurrent", ()):
        try:
            for rank in range(2):
                each(shard=Shard(rank, 2))
        except CheckpointError as error:  # odd numbers of heads; test_compositions.py has all families with even ones
            if "which 2 ranks cannot share" not in str(error):
                raise
    elif config.num_heads % 2 or (config.num_kv_heads % 2 and config.num_kv_heads > 1):
        with pytest.raises(CheckpointError, match="heads, which 2 ranks cannot share evenly"):
            each(shard=Shard(1, 2))
    elif name == PACKED:
        with pytest.raises(CheckpointError, match="down_proj: this rank's part, 48 to 96 of 96, cuts 32 columns"):
            each(shard=Shard(1, 2))
    else:
        for rank in range(2):
            model: Any = each(shard=Shard(rank, 2))
            attention = model.layers[0].attention
            assert attention.shape.num_heads == config.num_heads // 2
            if isinstance(attention, LatentAttention):
                assert len(attention.up_proj) == config.num_heads // 2
            else:
                assert attention.shape.num_kv_heads == max(1, config.attention(0).num_kv_heads // 2)
            first = None if isinstance(attention, LatentAttention) else config.attention(0)
            head_size = config.value_dim if first is None else first.value_dim or first.head_dim
            assert attention.o_proj.weight.shape[1] == config.num_heads // 2 * head_size
