"""Blocks of codes stand for the numbers that llama.cpp's own package makes of them, unpacked and packed, whole and in ranks' parts."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.formats.gguf import GgufFormat, read_gguf, unpack
from pilotlight.engine.weights.shard import Shard
from pilotlight.kernels.matrices.int4 import Int4Weight
from pilotlight.kernels.matrices.int8 import Int8Weight
from pilotlight.kernels.matrices.plain import PlainWeight
from tests.engine.gguf.files import Kind, random_blocks
from tests.engine.stored_weights import load

CODED = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


@pytest.mark.parametrize("kind", CODED, ids=lambda kind: kind.name)
def test_blocks_are_unpacked_to_the_bit(kind: Kind) -> None:
    blocks = random_blocks(kind, 6, 512)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, kind))
    assert torch.equal(unpack(kind.name.lower(), torch.from_numpy(blocks)), expected)


def write(directory: Path, matrices: dict[str, tuple[Kind, int]]) -> dict[str, torch.Tensor]:
    """Write codes of [rows, 64] as engine/gguf lists them; return their numbers."""
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


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((Kind.Q4_0, Kind.Q4_0), Int4Weight),
        ((Kind.Q8_0, Kind.Q8_0), Int8Weight),
        ((Kind.Q4_0, Kind.Q5_0), Int8Weight),
        ((Kind.Q8_0, Kind.Q4_1), PlainWeight),
    ],
)
def test_matrices_that_are_joined_keep_what_codes_they_can(
    kinds: tuple[Kind, Kind], expected: type, tmp_path: Path
) -> None:
    values = write(tmp_path, {"a.q_proj": (kinds[0], 16), "a.v_proj": (kinds[1], 8)})
    names, rows = list(values), [16, 8]
    found = load(tmp_path, lambda loader: loader.matrix(names, rows, 64), GgufFormat(True, None), keeps_packed=True)
    assert type(found) is expected
    assert torch.equal(found.unpack(torch.float32), torch.cat(list(values.values())))


@pytest.mark.parametrize("keeps_packed", [False, True])
def test_the_rows_of_heads_come_back_in_their_order(keeps_packed: bool, tmp_path: Path) -> None:
    values = write(tmp_path, {"a.q_proj": (Kind.Q8_0, 32), "a.v_proj": (Kind.Q8_0, 16)})
    format = GgufFormat(True, turned_head_dim=8)
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
            GgufFormat(True, None), keeps_packed, Shard(rank, 2),
        )  # fmt: skip
        return found.unpack(torch.float32)

    assert torch.equal(torch.cat([part(0), part(1)], dim=0 if split == "rows" else 1), values)


def test_parts_that_cut_a_block_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"a.o_proj": (Kind.Q8_0, 8)})
    with pytest.raises(CheckpointError, match=r"a\.o_proj: .* cuts 32 columns in one block"):
        load(
            tmp_path,
            lambda loader: loader.matrix(["a.o_proj"], [8], 64, split="columns", unit=8),
            GgufFormat(False, None),
            shard=Shard(0, 4),
        )


def test_a_config_that_nobody_wrote_is_refused() -> None:
    with pytest.raises(CheckpointError, match="none of a GGUF file"):
        read_gguf({"quant_method": "gguf", "bits": 3})
