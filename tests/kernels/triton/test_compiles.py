"""Every kernel compiles for Hopper (sm_90) in bf16, without a GPU: the compiler rejects what the interpreter lets through."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]

SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.triton import activation, decode_attention, norm, prefill_attention, qkv

TENSORS = {"q", "x", "out", "weight", "residual", "new_residual", "qkv", "norm", "k_cache", "v_cache", "q_out"}
TYPES = {"lens": "*i64", "tables": "*i64", "slots": "*i64", "starts": "*i32", "eps": "fp32", "scale": "fp32", "alpha": "fp32", "limit": "fp32"}
FP32 = {"cos", "sin", "tops", "sums", "parts", "sinks"}

def compile(kernel, replaced=(), **constants):
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
    types.update(replaced)
    compiled = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", 90, 32))
    ptx = compiled.asm["ptx"]
    print(kernel.__name__, constants, compiled.metadata.shared, "bytes shared", "wgmma" if "wgmma" in ptx else "")

for adds in (False, True):
    compile(norm._rms_norm, ADDS=adds, BLOCK=4096)
for kind in (0, 1, 2):
    compile(activation._gated, KIND=kind, BLOCK=1024)
for has_norm in (False, True):
    compile(qkv._rotate_and_cache, BLOCK=64, HAS_NORM=has_norm)
for dim, flagged, rows in ((128, False, 128), (128, True, 16), (64, True, 64), (256, False, 64)):
    flags = dict(HAS_WINDOW=flagged, HAS_SINKS=flagged)
    direct = rows == 16
    out = {} if direct else {"out": "*fp32"}
    compile(decode_attention._attend, out, BLOCK_SIZE=16, GROUP=16, DIM=dim, TILE=64, DIRECT=direct, **flags)
    compile(prefill_attention._attend, {"lens": "*i32"}, BLOCK_SIZE=16, ROWS=rows, DIM=dim, TILE=64, **flags)
compile(decode_attention._join, DIM=128, HAS_SINKS=True)
"""


@pytest.mark.timeout(300)
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "wgmma" in done.stdout, "a tile of 64 queries or more uses the tensor cores of Hopper"
