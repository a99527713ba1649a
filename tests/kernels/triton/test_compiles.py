"""Every kernel compiles for Hopper (sm_90) in bf16, without a GPU: the compiler rejects what the interpreter lets through."""

import pytest

from tests.kernels.triton.conftest import run_compiling

pytest.importorskip("triton")

pytestmark = [pytest.mark.process, pytest.mark.cpu_only]

SCRIPT = """
import sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from pilotlight.kernels.triton.elementwise import activation, kv_write, norm, qkv, rotary
from pilotlight.kernels.triton.launch import warps_for
from pilotlight.kernels.triton.state import chunks, delta_rule, gated_norm, short_conv, ssd
from pilotlight.kernels.triton.attention import decode_attention, hopper_mla, hopper_prefill, key_index, mla, prefill_attention, split_kv

TENSORS = {
    "q", "k", "v", "x", "out", "weight", "residual", "new_residual", "qkv", "norm", "k_cache", "v_cache", "q_out", "q_latent", "q_rotary", "cache",
    "keys",
}
TYPES = {"lens": "*i64", "visible": "*i64", "tables": "*i64", "slots": "*i64", "starts": "*i32"}
TYPES |= {"last_visible": "*i32"} | dict.fromkeys(("eps", "scale", "cap", "alpha", "limit"), "fp32")
FP32 = {"cos", "sin", "tops", "sums", "parts", "sinks", "kv_scales"}

def compile(kernel, replaced=(), warps=4, stages=3, maxnreg=None, **constants):
    types = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in TENSORS:
            types[name] = "*bf16"
        elif name in FP32:
            types[name] = "*fp32"
        else:
            types[name] = TYPES.get(name, "i32")
    types |= {name: kind for name, kind in dict(replaced).items() if name in types}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if types[name][0] == "*" or name.startswith("cache_")}
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": maxnreg}
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    compiled = triton.compile(source(kernel, types, constants, aligned), target=GPUTarget("cuda", 90, 32), options=options)
    ptx, shared = compiled.asm["ptx"], compiled.metadata.shared
    print(kernel.__module__, kernel.__name__, constants, shared, "bytes shared", "wgmma" if "wgmma" in ptx else "")
    assert shared <= 227 * 1024, "more than a block of threads has on Hopper"

for adds in (False, True):
    compile(norm._rms_norm, ADDS=adds, BLOCK=4096)
for kind in (0, 1, 2):
    compile(activation._gated, KIND=kind, BLOCK=1024)
NO_FP8, FP8_BY_BITS, FP8 = 0, 1, 2
BYTES = {"k_cache": "*u8", "v_cache": "*u8"}
for has_norm, fp8, varied in ((False, NO_FP8, False), (True, FP8, False), (True, FP8_BY_BITS, True)):
    sizes = dict(BLOCK_SIZE=16, HEADS=8, BLOCK=64, HAS_NORM=has_norm, FP8=fp8, PARTIAL=varied, GATES=varied)
    compile(qkv._rotate_and_cache, BYTES if fp8 else (), warps=2, **sizes)
compile(activation._apply_gate, dict.fromkeys(("gates", "y"), "*bf16"), BY_SIGMOID=True, BLOCK=128)
compile(kv_write._kv_write, BYTES, warps=2, BLOCK_SIZE=16, HEADS=8, BLOCK=128, FP8=FP8)
for interleaved in (False, True):
    compile(rotary._rotary, warps=2, HEADS=8, BLOCK=64, INTERLEAVED=interleaved)

def flags(of, fp8=NO_FP8):
    return dict(WINDOW=int(of), HAS_SINKS=of, HAS_CAP=of, FP8=fp8)

CHUNKED = {"WINDOW": 2}

WANTED = (
    (128, 16, False, flags(False)), (128, 64, True, flags(True)), (128, 16, False, flags(False, FP8)), (64, 16, False, flags(False, FP8_BY_BITS)),
    (128, 64, False, flags(False) | CHUNKED),
)
for dim, rows, direct, more in WANTED:
    types = ({} if direct else {"out": "*fp32"}) | (BYTES if more["FP8"] else {})
    rows, tile, warps = decode_attention.tiling(dim, rows, 2)
    sizes = dict(HEAD_DIM=dim, DIM=dim, BLOCK_SIZE=16, ROWS=rows, TILE=tile)
    compile(decode_attention._attend, types, warps, decode_attention.STAGES, DIRECT=direct, **sizes, **more)
for dim, longest, more in ((128, 2048, flags(False)), (256, 2048, flags(True)), (80, 30, flags(False, FP8)), (128, 2048, flags(False) | CHUNKED)):
    padded = triton.next_power_of_2(dim)
    rows, tile, warps, stages = prefill_attention.tiling(padded, longest, 2)
    types = {"lens": "*i32"} | (BYTES if more["FP8"] else {})
    for ahead in (False, True):
        sizes = dict(HEAD_DIM=dim, DIM=padded, BLOCK_SIZE=16, ROWS=rows, TILE=tile, SEES_AHEAD=ahead)
        compile(prefill_attention._attend, types, warps, stages, **sizes, **more)
for dim, window, has_sinks in ((64, 1, True), (128, 0, False), (128, 2, False)):
    sizes = dict(DIM=dim, BLOCK_SIZE=16, ROWS=hopper_prefill.ROWS, TILE=hopper_prefill.TILE, WINDOW=window, HAS_SINKS=has_sinks)
    compile(hopper_prefill._attend, {"lens": "*i32"}, hopper_prefill.WARPS, maxnreg=hopper_prefill.REGISTERS, **sizes)
for prefill, types in ((False, {"out": "*fp32", "starts": "*i64"}), (True, {"lens": "*i32"})):
    sizes = dict(LATENT=512, ROTARY=64, BLOCK_SIZE=16, ROWS=hopper_mla.ROWS, TILE=hopper_mla._TILE)
    compile(hopper_mla._attend, types, hopper_mla._WARPS, IS_PREFILL=prefill, DIRECT=prefill, **sizes)
LATENT = dict(LATENT=512, LATENT_DIM=512, ROTARY=64, ROTARY_DIM=64, BLOCK_SIZE=16, TILE=32)
NARROW = {"cache": "*u8", "cache_scale": "*fp32"}
for fp8, types in ((NO_FP8, {}), (FP8, NARROW), (FP8_BY_BITS, NARROW)):
    compile(mla._write, types, warps=2, LATENT=512, LATENT_DIM=512, HALF=32, PAIRS=32, BLOCK_SIZE=16, FP8=fp8)
    compile(mla._attend, {"out": "*fp32"} | types, 8, 5, ROWS=16, IS_PREFILL=False, DIRECT=False, FP8=fp8, **LATENT)
    compile(mla._attend, {"lens": "*i32"} | types, 8, 3, ROWS=64, IS_PREFILL=True, DIRECT=True, FP8=fp8, **LATENT)
    types = {"cache": "*u8"} if types else {}
    compile(key_index._write, types | {"scales": "*fp32"}, 1, HEAD_DIM=128, DIM=128, BLOCK_SIZE=16, FP8=fp8)
    INDEX = dict(HEADS=64, HEADS_DIM=64, HEAD_DIM=128, DIM=128, BLOCK_SIZE=16, KEYS=key_index._KEYS, TILE=64, FP8=fp8)
    compile(key_index._score, types | {"scales": "*fp32", "weights": "*fp32", "out": "*fp32"}, 4, **INDEX)
compile(split_kv._join, COLUMNS=512, DIM=512, CHUNK=16, HAS_SINKS=True)
PLACES = dict.fromkeys(("before", "first_runs", "ends", "after"), "*i64")
STORED = dict.fromkeys(("x", "weight", "bias", "states", "y", "gate", "steps", "decays", "xbc"), "*bf16")
WIDE = dict.fromkeys(("states", "decay_logs", "decay_bias", "step_bias", "skip", "inverse"), "*fp32")
for tokens in (1, 16):
    compile(short_conv._convolve, STORED | PLACES, WIDTH=4, HAS_BIAS=True, ACTIVATES=True, TOKENS=tokens, BLOCK=256)
compile(short_conv._keep, STORED | PLACES, BEFORE=3, BLOCK=256)
for by_row in (False, True):
    compile(delta_rule._apply, STORED | PLACES | WIDE, BY_ROW=by_row, KEY=128, VALUE=128, SHARED=2, ROWS=128, BLOCK=32)
compile(ssd._scan, STORED | PLACES | WIDE, STATE=128, VALUE=64, SHARED=128, ROWS=128, BLOCK=32)
CHUNK = dict(ROWS=128, TOKENS=chunks.CHUNK, PRECISION=chunks.PRECISIONS[torch.bfloat16])
compile(delta_rule._invert, STORED | PLACES | WIDE, KEY=128, SHARED=2, **CHUNK)
compile(delta_rule._advance, STORED | PLACES | WIDE, KEY=128, VALUE=128, SHARED=2, BLOCK=32, **CHUNK)
compile(ssd._scan_chunks, STORED | PLACES | WIDE, STATE=128, VALUE=64, SHARED=128, BLOCK=32, **CHUNK)
for gates_first, block in ((False, 128), (True, 8192)):
    compile(gated_norm._gated_norm, STORED, warps=warps_for(block), GATES_FIRST=gates_first, BLOCK=block)
"""


@pytest.mark.timeout(900)
def test_every_kernel_compiles_for_hopper() -> None:
    assert "wgmma" in run_compiling(SCRIPT), "a tile of 64 queries or more uses the tensor cores of Hopper"
