"""Files of adapters are read as by PEFT; an adapter that is not plain low-rank is refused by name."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotlight.engine.adapters.content import read_content
from pilotlight.engine.adapters.peft import CONFIG, WEIGHTS, AdapterError, check, describe, digest_of, projection_key
from pilotlight.engine.api.protocol import AdapterSource
from pilotlight.engine.weights.shard import MatrixPart, Shard
from pilotlight.kernels.lora import COLUMNS
from tests.adapters import source_of, write_adapter
from tests.checkpoints import write_llama

HIDDEN, HEADS, KV, INTERMEDIATE = 42, 60, 20, 123
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_adapter(directory / "a", write_llama(directory / "base"), rank=4)
    return directory / "a"


@pytest.fixture
def adapter(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "a"))


def configured(directory: Path, **changes: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def stored(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def projections(shard: Shard = Shard()) -> list[MatrixPart]:  # noqa: B008 - it is frozen
    """Return the projections of the tests' llama, or the heads and channels of a rank in them."""
    sizes = {
        "self_attn.q_proj": (HEADS, HIDDEN, 10), "self_attn.k_proj": (KV, HIDDEN, 10), "self_attn.v_proj": (KV, HIDDEN, 10),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN, 1), "mlp.up_proj": (INTERMEDIATE, HIDDEN, 1),
    }  # fmt: skip
    parts = []
    for i in range(3):
        name = f"model.layers.{i}"
        for module, (rows, columns, unit) in sizes.items():
            parts.append(MatrixPart(f"{name}.{module}", shard.span(rows, unit), Shard().span(columns)))
        parts.append(MatrixPart(f"{name}.self_attn.o_proj", Shard().span(HIDDEN), shard.span(HEADS, 10)))
        parts.append(MatrixPart(f"{name}.mlp.down_proj", Shard().span(HIDDEN), shard.span(INTERMEDIATE)))
    return parts


def test_an_adapter_is_described(adapter: Path) -> None:
    configured(adapter, alpha_pattern={"k_proj": 3, r"layers\.1\..*v_proj": 16})
    found = describe(adapter)
    assert (found.rank, len(found.projections)) == (4, 21)
    assert found.num_bytes == (adapter / WEIGHTS).stat().st_size
    q, k, v = (found.projections[f"layers.1.self_attn.{part}_proj"] for part in "qkv")
    assert (q.rank, q.rows, q.columns, q.scale) == (4, HEADS, HIDDEN, 2.0)
    assert (k.scale, v.scale) == (0.75, 4.0)
    configured(adapter, use_rslora=True)
    assert describe(adapter).projections["layers.0.mlp.down_proj"].scale == 8 / math.sqrt(4)


def test_a_digest_is_of_all_bytes(adapter: Path) -> None:
    before = digest_of(adapter)
    stored(adapter, lambda tensors: tensors[NAME][0].add_(1e-3))
    changed = digest_of(adapter)
    configured(adapter, lora_alpha=9)
    assert len({before, changed, digest_of(adapter)}) == 3


def test_names_begin_at_the_layer() -> None:
    assert projection_key("model.language_model.layers.3.mlp.up_proj") == "layers.3.mlp.up_proj"
    assert projection_key("lm_head") == "lm_head"
    for tower in ("model.vision_tower.encoder.layers.3.mlp.up_proj", "vision_model.layers.3.mlp.up_proj"):
        assert projection_key(tower) == tower, "a tower's layer is not the decoder's"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; adapters are of the type LORA"),
        ({"use_dora": True}, "use_dora is true, which is not supported here"),
        ({"bias": "all"}, 'bias is "all"'),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save is \["lm_head"\]'),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"some_new_method": {"a": 1}}, "some_new_method"),
        ({"lora_alpha": "8"}, "lora_alpha of .* is '8'; it must be a number"),
        ({"lora_alpha": True}, "lora_alpha"),
        ({"r": 5}, "has rank 4 in A and 4 in B, and adapter_config.json says 5"),
        ({"rank_pattern": {"v_proj": 3}}, "v_proj has rank 4"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"(": 1}}, "invalid pattern"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "repeats more than one part of it, or a group"),
        ({"rank_pattern": {"(.|.)*b": 1}}, "repeats more than one part of it, or a group"),
        ({"rank_pattern": {"x" * 301: 1}}, "rank_pattern has the pattern 'xxx"),
        ({"rank_pattern": {f"p{i}": 1 for i in range(4097)}}, "an object of at most 4096 patterns"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(adapter: Path, changes: dict[str, Any], why: str) -> None:
    configured(adapter, **changes)
    with pytest.raises(AdapterError, match=why):
        describe(adapter)


def rename(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors.pop(NAME)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop(NAME), "q_proj has .*lora_B.weight without its other half"),
        (lambda t: t.update({NAME: t[NAME].flatten()}), "it must be a matrix"),
        (lambda t: t.update({NAME: t[NAME].int()}), "has type I32"),
        (lambda t: t.update({NAME: torch.ones(3, HIDDEN)}), "has rank 3 in A and 4 in B"),
        (lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(2, 2)}), "lm_head.weight is not lora_A"),
        (lambda t: rename(t, NAME.replace("lora_A", "lora_embedding_A")), "lora_embedding_A"),
        (lambda t: t.update({NAME.replace("lora_A", "lora_magnitude_vector"): torch.ones(2)}), "magnitude_vector"),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_tensors_that_are_no_pairs_are_refused(adapter: Path, change: Callable[..., object], why: str) -> None:
    stored(adapter, change)
    with pytest.raises(AdapterError, match=why):
        describe(adapter)


def test_a_rank_that_is_too_large_is_refused(adapter: Path) -> None:
    stored(adapter, lambda t: t.update({NAME: torch.ones(65, HIDDEN), NAME.replace("_A", "_B"): torch.ones(HEADS, 65)}))
    configured(adapter, rank_pattern={r"layers\.0\.self_attn\.q_proj": 65})
    with pytest.raises(AdapterError, match="rank 65; adapters of ranks up to 64 are computed"):
        describe(adapter)


def half(tensors: dict[str, torch.Tensor], dtype: torch.dtype, value: float) -> None:
    tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})
    tensors[NAME][1, 2] = value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_door_reads_every_number(adapter: Path, dtype: torch.dtype) -> None:
    stored(adapter, lambda tensors: half(tensors, dtype, 0.5))
    assert check(adapter).rank == 4
    for value in (math.nan, -math.inf):
        stored(adapter, lambda tensors, value=value: half(tensors, dtype, value))  # type: ignore[misc]
        with pytest.raises(AdapterError, match=r"layers\.0\.self_attn\.q_proj\.lora_A\.weight holds NaN or infinity"):
            check(adapter)


def test_the_door_knows_the_base_the_largest_rank_and_what_would_change_nothing(adapter: Path) -> None:
    base = {projection_key(part.name): (part.rows.total, part.columns.total) for part in projections()}
    assert check(adapter, 4, base).rank == 4
    for base_now, most, why in (
        (
            base | {"layers.1.mlp.up_proj": (30, 42)},
            4,
            r"of another model: layers\.1\.mlp.up_proj is \[123, 42\] there",
        ),
        ({key: base[key] for key in base if "down" not in key}, 4, "down_proj, which this model does not have"),
        (base, 3, "it has rank 4; ranks up to 3 are supported here"),
    ):
        with pytest.raises(AdapterError, match=why):
            check(adapter, most, base_now)
    configured(adapter, lora_alpha=0)
    with pytest.raises(AdapterError, match="lora_alpha is 0, so that it changes nothing"):
        check(adapter)
    configured(adapter, alpha_pattern={"q_proj": 1}, model_type="llama")  # as in files for Workers AI
    assert check(adapter).rank == 4


def test_tensors_that_lie_in_one_another_and_a_header_without_an_end_are_refused(adapter: Path) -> None:
    entry = {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, 16384]}
    for header in ({f"t{i}": entry for i in range(9)}, None):
        raw = b"[" * 100_000 if header is None else json.dumps(header).encode()
        (adapter / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(16384))
        with pytest.raises(AdapterError, match="tensor t1 .* begins at byte 0" if header else "damaged"):
            check(adapter)


def test_pickled_missing_and_torn_files_are_refused(adapter: Path, tmp_path: Path) -> None:
    content = (adapter / WEIGHTS).read_bytes()
    (adapter / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(AdapterError, match="cannot be read"):
        describe(adapter)
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match="a pickled file may run any code: save it as safetensors"):
        describe(adapter)
    (adapter / CONFIG).write_text("{")
    with pytest.raises(AdapterError, match="is not JSON"):
        describe(adapter)
    (adapter / CONFIG).write_text("[]")
    with pytest.raises(AdapterError, match="peft_type is None"):
        describe(adapter)
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
        describe(tmp_path / "nothing")


def test_content_is_each_product_of_an_adapter(adapter: Path) -> None:
    content = read_content(source_of(adapter), projections(), torch.float32)
    assert content.rank == 8
    tensors, x = load_file(adapter / WEIGHTS), torch.randn(HIDDEN)
    a_at, b_at, rank = content.places[1].tolist()  # the key projection of the first layer
    name = NAME.replace("q_proj", "k_proj")
    a = content.values[a_at : a_at + rank * HIDDEN].view(rank, HIDDEN)
    b = content.values[b_at : b_at + rank * COLUMNS].view(rank, COLUMNS)[:, :KV].T
    wanted = 2.0 * tensors[name.replace("_A", "_B")] @ (tensors[name] @ x)
    assert torch.allclose(b @ (a @ x), wanted, atol=1e-5)


@pytest.mark.parametrize("size", [2])
def test_ranks_have_parts_whose_sum_is_the_whole(adapter: Path, size: int) -> None:
    parts = [read_content(source_of(adapter), projections(Shard(rank, size)), torch.float32) for rank in range(size)]
    whole = read_content(source_of(adapter), projections(), torch.float32)

    def product(content: Any, number: int, part: MatrixPart) -> torch.Tensor:
        a_at, b_at, rank = content.places[number].tolist()
        a = content.values[a_at : a_at + rank * part.columns.size].view(rank, -1)
        blocks = -(-part.rows.size // COLUMNS)
        b = content.values[b_at : b_at + blocks * rank * COLUMNS].view(blocks, rank, COLUMNS)
        return b.transpose(1, 2).flatten(0, 1)[: part.rows.size] @ a

    for number, part in enumerate(projections()):
        of_ranks = [projections(Shard(rank, size))[number] for rank in range(size)]
        products = [product(content, number, each) for content, each in zip(parts, of_ranks, strict=True)]
        joined = torch.cat(products, dim=1 if part.name.endswith(("o_proj", "down_proj")) else 0)
        assert torch.allclose(joined, product(whole, number, part), atol=1e-5), part.name


def test_an_adapter_of_another_model_is_refused(adapter: Path) -> None:
    source, parts = source_of(adapter), projections()
    wrong = [part._replace(rows=Shard().span(30)) if part.name.endswith("1.mlp.up_proj") else part for part in parts]
    with pytest.raises(
        AdapterError, match=r"of another model: layers\.1\.mlp.up_proj is \[123, 42\] there, and \[30, 42\]"
    ):
        read_content(source, wrong, torch.float32)
    with pytest.raises(AdapterError, match=r"it changes layers\.2\.mlp\.down_proj, which this model does not have"):
        read_content(source, parts[:14], torch.float32)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_non_finite_numbers_are_refused(adapter: Path, value: float) -> None:
    stored(adapter, lambda tensors: tensors[NAME.replace("_A", "_B")][3].fill_(value))
    configured(adapter, lora_alpha=400)
    with pytest.raises(AdapterError, match=r"q_proj\.lora_B\.weight holds NaN or infinity"):
        read_content(source_of(adapter), projections(), torch.float32)


def test_files_that_were_changed_after_their_registration_are_refused(adapter: Path) -> None:
    source = source_of(adapter)
    configured(adapter, lora_alpha=9)
    with pytest.raises(AdapterError, match="are not those that were registered"):
        read_content(source, projections(), torch.float32)
    with pytest.raises(AdapterError, match=r"cannot be read|has no"):
        read_content(AdapterSource("gone", str(adapter / "gone"), source.digest), projections(), torch.float32)
