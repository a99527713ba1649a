"""Tensors that contain several matrices are divided by rows, or refused with an error."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.checkpoint import index_checkpoint
from pilotlight.engine.weights.fused import FusedRows, divide
from tests.checkpoints import change_tensors
from tests.engine import quantizers
from tests.engine.driver import load_engine
from tests.engine.families import write_family
from tests.engine.quantizers import write_quantized
from tests.engine.stored_weights import write_tensors

PHI, GRANITE = "phi3, fused, six heads over two", "granite-moe, stacks of five experts"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def test_parts_are_runs_of_the_files_own_bytes(tmp_path: Path) -> None:
    write_tensors(
        tmp_path,
        {"l.qkv.weight": torch.randn(12, 3), "l.qkv.weight_scale": torch.randn(6, 1), "l.o.weight": torch.randn(3, 3)},
    )
    stored = index_checkpoint(tmp_path)
    found = divide(stored, (FusedRows("qkv", {"q": 8, "k": 2, "v": 2}),))
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "l.q.weight": (8, 3), "l.k.weight": (2, 3), "l.v.weight": (2, 3), "l.o.weight": (3, 3),
        "l.q.weight_scale": (4, 1), "l.k.weight_scale": (1, 1), "l.v.weight_scale": (1, 1),
    }  # fmt: skip
    assert found["l.q.weight"].start == stored["l.qkv.weight"].start
    assert found["l.q.weight"].end == found["l.k.weight"].start
    assert found["l.v.weight"].end == stored["l.qkv.weight"].end


def test_a_scale_of_all_rows_is_every_parts(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"l.qkv.weight_scale": torch.randn(1), "l.qkv.input_scale": torch.randn(())})
    found = divide(index_checkpoint(tmp_path), (FusedRows("qkv", {"q": 8, "k": 2}),))
    assert found["l.q.weight_scale"] == found["l.k.weight_scale"]
    assert set(found) == {"l.q.weight_scale", "l.k.weight_scale", "l.q.input_scale", "l.k.input_scale"}


def test_a_quantized_layout_whose_rows_are_columns_is_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, Phi3Config, quantizers.gptq, GPTQ, head_dim=None, sliding_window=None)
    with pytest.raises(CheckpointError, match=r"_proj\.g_idx .*export it in such a layout"):
        load_engine(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "words"),
    [
        (PHI, "self_attn.qkv_proj.weight", lambda stored: stored[:-1], r"\[99, 60\], which is not the 100 rows of self_attn.q_proj"),
        (PHI, "mlp.gate_up_proj.weight", lambda stored: stored[:-2], r"\[244, 60\], which is not the 246 rows of mlp.gate_proj"),
        (GRANITE, "block_sparse_moe.input_linear.weight", lambda stored: stored[:-1], "config.json makes it a stack of 5 matrices"),
        (GRANITE, "block_sparse_moe.output_linear.weight", lambda stored: stored[:, :-1], r"which is not the 60 rows of"),
    ],
)  # fmt: skip
def test_tensors_of_other_shapes_than_the_configs_are_named(
    tmp_path: Path, name: str, tensor: str, change: Any, words: str
) -> None:
    write_family(tmp_path, name)
    key = f"model.layers.1.{tensor}"
    change_tensors(tmp_path, lambda tensors: tensors.update({key: change(tensors[key]).contiguous()}))
    with pytest.raises(CheckpointError, match=words):
        load_engine(tmp_path)
