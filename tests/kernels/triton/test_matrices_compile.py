"""Matrix products of every format, experts included, compile for Hopper (sm_90) in bf16 with their tiles, without a GPU."""

import pytest

from tests.kernels.triton.conftest import run_compiling

pytest.importorskip("triton")

pytestmark = [pytest.mark.process, pytest.mark.cpu_only]

SCRIPT = """
import re
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pilotlight.kernels.triton.matrices import fp8_linear, linear, packed
from pilotlight.kernels.triton import moe, routing

TYPES = {"x": "*bf16", "weight": "*bf16", "scales": "*bf16", "zeros": "*u8", "bias": "*bf16", "out": "*bf16", "hidden": "*bf16", "logits": "*bf16",
         "ids": "*i64", "order": "*i64", "table": "*i32", "weights": "*fp32", "parts": "*fp32", "pairs": "i32", "alpha": "fp32", "limit": "fp32",
         "scale": "fp32", "words": "*i32"}
# what a model's sizes are multiples of 16 in, so that loads are as wide as they will be
ALIGNED = {"columns", "split_columns", "weight_row", "weight_expert", "x_token", "hidden_row", "out_token", "intermediate", "out_pair"}

def compile(kernel, replaced=(), warps=4, stages=3, **constants):
    types = {name: "constexpr" if name in constants else dict(replaced).get(name, TYPES.get(name, "i32")) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, type) in enumerate(types.items())
               if type != "constexpr" and (type[0] == "*" or name in ALIGNED)}
    source = ASTSource(kernel, types, constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps, num_stages=stages))
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= 227 << 10, compiled.metadata.shared
    return ptx

FORMATS = {"plain": (0, {}), "fp8": (1, {"weight": "*u8", "scales": "*fp32"}), "int4": (2, {"weight": "*u8"}),
           "mxfp4": (3, {"weight": "*u8", "scales": "*u8"})}

def product(name, tokens):
    number, types = FORMATS[name]
    tile = linear.tile_for(tokens, torch.bfloat16, name == "plain")
    return compile(linear._multiply, types, tile.warps, tile.stages, FORMAT=number, HAS_ZEROS=name == "int4", HAS_BIAS=True, DIRECT=tokens > 16,
                   FEW=tile.tokens <= linear.FEW, TOKENS=tile.tokens, ROWS=tile.rows, HALF=tile.half, STAGES=tile.stages)

def few_rows(name, tokens, blocks, has_zeros):
    number, types = FORMATS[name]
    strip = packed.strip_for(tokens, 4096, 132)
    return compile(packed._multiply, {**types, "x": "*i32"}, strip.warps, FORMAT=number, HAS_ZEROS=has_zeros, HAS_BIAS=True, BLOCKS=blocks,
                   LATE=name == "int4" and blocks % 4 == 0, PAIRWISE=True, TOKENS=strip.tokens,
                   TILES=strip.tiles, WARPS=strip.warps, AHEAD=strip.tokens < 32)

def experts(name, pairs, is_gated=True):
    number, types = FORMATS[name]
    tile = moe.tile_for(pairs, 1, torch.bfloat16, name == "plain")
    biased = name == "mxfp4"
    shared = dict(FORMAT=number, HAS_ZEROS=name == "int4", HAS_BIAS=biased, TOKENS=tile.tokens, HALF=tile.half)
    kind = dict(KIND=2 if biased else 0 if is_gated else 3, IS_GATED=is_gated)
    first = compile(moe._gate_up, types, tile.warps, tile.stages, ROWS=tile.rows, **kind, **shared)
    return first, compile(moe._down, types, tile.warps, tile.stages, ROWS=2 * tile.rows, **shared)

def assert_nothing_moves(ptx, name):
    assert "ld.global.v4.b32" in ptx, "16 bytes a thread at a time"
    loop = ptx[ptx.index("ld.global"):ptx.rindex("mma.sync")]
    assert "bar.sync" not in loop and "shared" not in loop and "shfl" not in loop, f"{name}: a value changes its thread"

def experts_of_few(name, tokens, blocks):
    number, types = FORMATS[name]
    shared = dict(HAS_BIAS=True, FORMAT=number, HAS_ZEROS=name == "int4", BLOCKS=blocks, LATE=blocks % 4 == 0, PAIRWISE=True, TOKENS=tokens,
                  WARPS=moe.WARPS)
    yield compile(moe._gate_up_packed, {**types, "x": "*i32"}, moe.WARPS, KIND=0, **shared)
    yield compile(moe._down_packed, {**types, "hidden": "*i32"}, moe.WARPS, **shared)

WIDE = re.compile(r"cp[.]async[.]c[ag][.]shared[.]global [^;]*, 0x10[ ,;]")
assert WIDE.search(product("plain", 1)), "a weight is fetched ahead, 16 bytes at a time"
for name, tokens, blocks, has_zeros in (
    ("int4", 1, 4, False), ("int4", 16, 0, True), ("int4", 32, 4, False), ("int4", 8, 2, True), ("mxfp4", 1, 1, False), ("mxfp4", 9, 1, False),
):
    assert_nothing_moves(few_rows(name, tokens, blocks, has_zeros), name)
for name, tokens, blocks in (("int4", 8, 4), ("mxfp4", 16, 1)):
    for ptx in experts_of_few(name, tokens, blocks):
        assert_nothing_moves(ptx, f"experts in {name}")
for name in ("int4", "mxfp4"):
    ptx = compile(packed._unpack, {**FORMATS[name][1], "out": "*i64"}, FORMAT=FORMATS[name][0], HAS_ZEROS=name == "int4", BLOCKS=1,
                  TYPE=tl.bfloat16, ROWS=8, WORDS=128)
    assert "ld.global.v4.b32" in ptx and "st.global.v2.b64" in ptx, "16 bytes a thread at a time"
    assert "wgmma" in product(name, 64)
    assert "wgmma" in product(name, 512)
for name in FORMATS:
    assert "mma.sync" in experts(name, 1)[0]
    assert all("wgmma" in ptx and "cp.async" in ptx for ptx in experts(name, 1000))
for pairs in (40, 200):
    assert all("wgmma" in ptx for ptx in experts("plain", pairs))
    assert "wgmma" in experts("plain", pairs, is_gated=False)[0]
compile(linear.add_parts, HAS_BIAS=True, BLOCK=256)
compile(moe._weighted_sum, {"pairs": "*bf16"}, BLOCK=1024)
compile(routing._route, warps=1, RENORMALISE=True, EXPERTS=128, SLOTS=8)
compile(routing._route_in_groups, {"bias": "*fp32"}, warps=1, RENORMALISE=True, GROUPS=8, SIZE=32, SLOTS=8)
for is_sorted in (False, True):
    compile(moe._by_expert, IS_SORTED=is_sorted, EXPERTS=512, PAIRS=64, TILES=16, COUNTED=512)
compile(fp8_linear._quantise, {"values": "*u8", "scales": "*fp32", "scale": "*fp32"}, LARGEST=448.0, GIVEN=False, GROUPS=16, BLOCK=128)
bits = {"x": "*u8", "weight": "*u8", "x_scales": "*fp32", "weight_scales": "*fp32"}
for tokens, instruction in ((1, "mma.sync"), (512, "wgmma")):
    tile = fp8_linear.tile_for(tokens)
    ptx = compile(fp8_linear._multiply, bits, tile.warps, tile.stages, EXACT=False, HAS_BIAS=True, DIRECT=tokens > 16,
                  TOKENS=tile.tokens, ROWS=tile.rows, DEPTH=128)
    assert instruction in ptx and "e4m3" in ptx
"""


@pytest.mark.timeout(900)
def test_products_and_experts_compile_for_hopper() -> None:
    run_compiling(SCRIPT)
