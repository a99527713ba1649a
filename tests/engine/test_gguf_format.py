"""GGUF blocks have the values that llama.cpp's package computes: unpacked and packed, whole and in the parts of ranks."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.formats.gguf import GgufFormat, read_gguf
from pilotlight.engine.weights.shard import Shard
from pilotlight.kernels.matrices.blocks import BlockWeight, unpack
from tests.engine.gguf.files import Kind, random_blocks
from tests.engine.stored_weights import load

CODED = [
    Kind.Q4_0,
    Kind.Q4_1,
    Kind.Q5_0,
    Kind.Q5_1,
    Kind.Q8_0,
    Kind.Q3_K,
    Kind.Q4_K,
    Kind.Q5_K,
    Kind.Q6_K,
    Kind.IQ4_NL,
    Kind.MXFP4,
]


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_blocks_are_unpacked_to_the_bit(kind: Kind) -> None:
    blocks = random_blocks(kind, 6, 512)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert torch.equal(unpack(kind.name.lower(), torch.from_numpy(blocks)), expected)


def write(directory: Path, matrices: dict[str, tuple[Kind, int]]) -> dict[str, torch.Tensor]:
    """Write matrices [rows, 64] as blocks of codes, with the index that engine/gguf makes; return their values."""
    index, values, content = {}, {}, b""
    for name, (kind, rows) in matrices.items():
        blocks = random_blocks(kind, rows, 64)
        index[f"{name}.{kind.name.lower()}"] = {
            "dtype": "U8", "shape": list(blocks.shape), "data_offsets": [len(content), len(content) + blocks.nbytes]
        }  # fmt: skip
        content += blocks.tobytes()
        values[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    (directory / "model.gguf").write_bytes(content)
    (directory / "model.gguf.index").write_text(json.dumps(index))
    return values


@pytest.mark.parametrize("kinds", [(Kind.Q4_0, Kind.Q4_0), (Kind.Q8_0, Kind.Q4_1), (Kind.Q5_0, Kind.IQ4_NL, Kind.Q8_0)])
def test_matrices_that_are_joined_stay_as_they_are_of_whatever_kinds(kinds: tuple[Kind, ...], tmp_path: Path) -> None:
    names = ["a.q_proj", "a.k_proj", "a.v_proj"][: len(kinds)]
    values = write(
        tmp_path, {name: (kind, 8 * (i + 1)) for i, (name, kind) in enumerate(zip(names, kinds, strict=True))}
    )
    rows = [len(value) for value in values.values()]
    found = load(tmp_path, lambda loader: loader.matrix(names, rows, 64), GgufFormat(None), keeps_packed=True)
    assert isinstance(found, BlockWeight)
    assert found.kinds == tuple(kind.name.lower() for kind in kinds)
    assert torch.equal(found.unpack(torch.float32), torch.cat(list(values.values())))


def test_matrices_of_all_experts_are_one_where_their_kind_is_one(tmp_path: Path) -> None:
    names = ["a.0.gate_proj", "a.0.up_proj", "a.1.gate_proj", "a.1.up_proj"]
    values = write(tmp_path, {name: (Kind.Q4_1, 8) for name in names})
    found = load(
        tmp_path, lambda loader: loader.matrix(names, [8] * 4, 64, experts=2), GgufFormat(None), keeps_packed=True
    )
    assert isinstance(found, BlockWeight)
    assert found.shape == (2, 16, 64)
    assert torch.equal(found.expert(1).unpack(torch.float32), torch.cat(list(values.values())[2:]))


@pytest.mark.parametrize("keeps_packed", [False, True])
def test_the_rows_of_heads_come_back_in_their_order(keeps_packed: bool, tmp_path: Path) -> None:
    values = write(tmp_path, {"a.q_proj": (Kind.Q8_0, 32), "a.v_proj": (Kind.Q8_0, 16)})
    format = GgufFormat(turned_head_dim=8)
    found = load(tmp_path, lambda loader: loader.matrix(list(values), [32, 16], 64), format, keeps_packed)
    heads = values["a.q_proj"].view(4, 4, 2, 64).transpose(1, 2).reshape(32, 64)
    assert torch.equal(found.unpack(torch.float32), torch.cat((heads, values["a.v_proj"])))


@pytest.mark.parametrize("split", ["rows", "columns"])
@pytest.mark.parametrize("keeps_packed", [False, True])
def test_ranks_have_their_parts(split: Any, keeps_packed: bool, tmp_path: Path) -> None:
    values = write(tmp_path, {"a.q_proj": (Kind.Q8_0, 32)})["a.q_proj"]

    def part(rank: int) -> torch.Tensor:
        found = load(
            tmp_path,
            lambda loader: loader.matrix(["a.q_proj"], [32], 64, split=split, unit=8 if split == "rows" else 32),
            GgufFormat(None), keeps_packed, Shard(rank, 2),
        )  # fmt: skip
        return found.unpack(torch.float32)

    assert torch.equal(torch.cat([part(0), part(1)], dim=0 if split == "rows" else 1), values)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_projection_of_latent_vectors_is_joined_from_that_to_keys_and_that_to_values(
    ranks: int, tmp_path: Path
) -> None:
    values = write(tmp_path, {"a.k_b_proj": (Kind.Q8_0, 4 * 64), "a.v_b_proj": (Kind.Q4_1, 4 * 32)})
    index = json.loads((tmp_path / "model.gguf.index").read_text())
    for entry in index.values():
        entry["shape"] = [4, entry["shape"][0] // 4, entry["shape"][1]]
    (tmp_path / "model.gguf.index").write_text(json.dumps(index))
    keys, of_values = values["a.k_b_proj"].view(4, 64, 64).transpose(1, 2), values["a.v_b_proj"].view(4, 32, 64)
    parts = [
        load(
            tmp_path,
            lambda loader: loader.matrix(["a.kv_b_proj"], [4 * 96], 64, split="rows", unit=96),
            GgufFormat(None),
            shard=Shard(rank, ranks),
        ).unpack(torch.float32)
        for rank in range(ranks)
    ]
    assert torch.equal(torch.cat(parts), torch.cat((keys, of_values), 1).flatten(0, 1))


def test_parts_that_cut_a_block_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"a.o_proj": (Kind.Q8_0, 8)})
    with pytest.raises(CheckpointError, match=r"a\.o_proj: .* cuts 32 columns in one block"):
        load(
            tmp_path,
            lambda loader: loader.matrix(["a.o_proj"], [8], 64, split="columns", unit=8),
            GgufFormat(None),
            shard=Shard(0, 4),
        )


def test_an_unknown_gguf_config_is_refused() -> None:
    with pytest.raises(CheckpointError, match="does not describe a GGUF file"):
        read_gguf({"quant_method": "gguf", "kinds": ["q9_9"]})
