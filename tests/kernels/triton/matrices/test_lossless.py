"""Triton's form of products in 12 bits: decoding is exact for any tiles, and code for Hopper (sm_90) has few instructions per weight."""

import pytest
import torch

pytest.importorskip("triton")

from pilotlight.kernels.matrices.lossless import LosslessWeight, pack_lossless
from pilotlight.kernels.triton.matrices import lossless as form
from pilotlight.kernels.triton.matrices.packed import Strip
from tests.closeness import assert_close
from tests.kernels.conftest import DEVICE
from tests.kernels.matrices.test_lossless import ALL_VALUES, bits, trained
from tests.kernels.triton.conftest import run_compiling

pytestmark = pytest.mark.long

TYPE = torch.bfloat16
RATIO = 2.0**-7 if DEVICE == "cpu" else 2.0**-8  # allowed error; the interpreter truncates excess digits


def test_all_65536_values_come_back() -> None:
    in_palettes = ALL_VALUES.view(256, 256)  # eight rows have eight different high bytes, so there are no escapes
    nearly_all_escapes = ALL_VALUES[torch.randperm(1 << 16, device="cpu")[:1500]].view(5, 300)
    for plain in (in_palettes.to(DEVICE), nearly_all_escapes.to(DEVICE)):
        weight = pack_lossless(plain)
        assert bits(form.unpack_lossless(weight.codes, weight, torch.bfloat16)) == bits(plain)


@pytest.mark.parametrize("columns", [1, 65, 128, 1030])
@pytest.mark.parametrize("rows", [1, 19])
def test_weights_come_back_whole_and_by_rows(rows: int, columns: int) -> None:
    plain = trained(rows, columns, outliers=9)
    weight = pack_lossless(plain)
    assert torch.equal(form.unpack_lossless(weight.codes, weight, torch.float32), plain.float())
    for numbers in (torch.randint(rows, (5,)), torch.randint(rows, (3,), dtype=torch.int32), torch.empty(0).long()):
        assert bits(form.lossless_rows(numbers, weight, torch.bfloat16)) == bits(plain[numbers])
    assert torch.equal(form.lossless_rows(torch.tensor([0]), weight, torch.float32, 3.0), plain[:1].float() * 3.0)


def test_a_number_that_the_table_lacks_spoils_no_other_row() -> None:
    plain = trained(8, 130, outliers=5)
    found = form.lossless_rows(torch.tensor([3, 8, -1, 0]), pack_lossless(plain), torch.float32)
    assert found[[1, 2]].isnan().all()
    assert torch.equal(found[[0, 3]], plain[[3, 0]].float())


def test_experts_are_unpacked_one_below_the_other() -> None:
    plain = trained(3 * 16, 200, outliers=20)
    weight = pack_lossless(plain).by_expert(3)
    assert bits(form.unpack_lossless(weight.codes, weight, torch.bfloat16)) == bits(plain.view(3, 16, 200))


@pytest.mark.parametrize("strip", [Strip(8, 1, 8), Strip(8, 2, 4), Strip(16, 1, 2), Strip(32, 2, 4)])
def test_every_strip_gives_the_same_product(strip: Strip) -> None:
    for rows, columns in ((41, 1100), (9, 431)):
        plain, bias = trained(rows, columns, outliers=150), torch.randn(rows)
        for tokens in {1, strip.tokens + 3}:
            x = torch.randn(tokens, columns + 3)[:, :columns]  # rows of x have a gap between them
            y = form.product(x.to(TYPE), pack_lossless(plain), bias.to(TYPE), strip)
            expected = x.to(TYPE).double() @ plain.double().T + bias.to(TYPE).double()
            assert_close("y", expected, y, RATIO)


def test_a_row_of_x_has_the_same_bits_in_any_company() -> None:
    plain, x = trained(24, 640, outliers=40), torch.randn(32, 640).to(TYPE)
    weight = pack_lossless(plain)
    together = form.lossless_linear(x, weight)
    for tokens in (1, 5, 16):
        assert torch.equal(form.lossless_linear(x[:tokens], weight), together[:tokens])


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # rows of zeros fill up a tile of x
def test_infinity_and_nan_in_a_weight_reach_their_outputs_alone() -> None:
    plain = trained(40, 300)
    plain[3, 7], plain[9, 299], plain[20, 0] = torch.inf, torch.nan, -torch.inf
    plain[26] = torch.inf  # the palette contains its high byte, so it is no escape
    for tokens in (1, 3, 70):
        x = torch.rand(tokens, 300) + 1
        y = form.lossless_linear(x.to(TYPE), pack_lossless(plain))
        assert y[:, [3, 26]].isposinf().all()
        assert y[:, 9].isnan().all()
        assert y[:, 20].isneginf().all()
        assert y.isfinite().sum() == tokens * 36


def test_a_weight_that_is_mostly_escapes_is_multiplied_right() -> None:
    plain = (torch.randn(9, 200) * 2.0 ** torch.randint(-60, 10, (9, 200))).to(torch.bfloat16)
    weight = pack_lossless(plain)
    assert len(weight.escapes) > 900
    for tokens in (1, 5):
        x = torch.randn(tokens, 200)
        assert_close("y", x.to(TYPE).double() @ plain.double().T, form.lossless_linear(x.to(TYPE), weight), RATIO)


def test_rows_of_a_weight_pass_through_a_small_scratch() -> None:
    plain, bias, x = trained(41, 300, outliers=60), torch.randn(41), torch.randn(70, 300)
    weight: LosslessWeight = pack_lossless(plain)
    expected = x.to(TYPE).double() @ plain.double().T
    few = 16 * 300 * 4
    assert_close("y", expected, form.lossless_linear(x.to(TYPE), weight, None, few), RATIO)
    product = form.lossless_linear(x.to(TYPE), weight, bias.to(TYPE), few)
    assert_close("y", expected + bias.to(TYPE).double(), product, RATIO)


SCRIPT = """
import re, subprocess, tempfile
from collections import Counter
from pathlib import Path
import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pilotlight.kernels.triton.matrices import lossless

TYPES = {"x": "*bf16", "x_words": "*i32", "words": "*i32", "codes": "*u8", "palette_words": "*i32", "starts": "*i32", "escapes": "*i32",
         "bias": "*bf16", "out": "*bf16", "numbers": "*i64", "scale": "fp32"}
ALIGNED = {"columns", "x_token", "out_token", "row_bytes", "row_words", "x_words_token", "num_x_words"}  # as a model's sizes are
DISASSEMBLER = Path(triton.backends.nvidia.__file__).parent / "bin/nvdisasm"
INTEGER = ("PRMT", "LOP3", "SHF", "IMAD", "IADD3", "VIADD", "LEA", "ISETP", "SEL", "SGXT", "IABS", "IMNMX", "VIMNMX")

def compile(kernel, replaced=(), warps=4, maxnreg=None, **constants):
    types = {name: "constexpr" if name in constants else dict(replaced).get(name, TYPES.get(name, "i32")) for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, (name, type) in enumerate(types.items())
               if type != "constexpr" and (type[0] == "*" or name in ALIGNED)}
    source = ASTSource(kernel, types, constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps, maxnreg=maxnreg))
    assert compiled.metadata.shared <= 227 << 10, compiled.metadata.shared
    return compiled

def loop(compiled):
    '''The instructions of the first loop, by name: that over the columns.'''
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code = subprocess.run([DISASSEMBLER, "-c", file.name], capture_output=True, text=True, check=True).stdout
    lines = [line.strip() for line in code.splitlines()]
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    for i, line in enumerate(lines):
        target = re.search(r"BRA(?:[.]\\w+)? .*`[(]([.]L\\w+)[)]", line)
        if target and labels.get(target[1], i) < i:
            names = (re.match(r"/[*]\\w+[*]/\\s+(?:@!?U?P\\w+ )?(\\w+)", one) for one in lines[labels[target[1]] : i + 1])
            found = Counter(name[1] for name in names if name)
            assert not found["STL"] + found["LDL"], "registers are spilt at every turn"
            return found
    raise AssertionError("there is no loop")

for tokens in (1, 16, 32):
    strip = lossless.strip_for(tokens)
    compiled = compile(lossless._multiply, {}, strip.warps, maxnreg=lossless._REGISTERS[strip.tokens], HAS_BIAS=True, PERMUTES=True,
                       TOKENS=strip.tokens, TILES=strip.tiles, WARPS=strip.warps, AHEAD=tokens < 32)
    instructions, weights = loop(compiled), 64 * strip.tiles
    integer = sum(instructions[name] for name in INTEGER) / weights
    print(tokens, f"{integer:.2f} integer, {instructions.total() / weights:.2f} instructions a weight", dict(instructions))
    assert instructions["PRMT"] >= 1.25 * weights, "bytes are permuted, not shifted one by one"
    assert not instructions["BAR"] + instructions["LDS"] + instructions["SHFL"], "a value changes its thread"
    assert instructions["HMMA"] == weights // 8 * (strip.tokens // 8)
    assert tokens > 1 or integer <= 4.6, "a GPU that reads 4.8 TB/s has time for no more"
ptx = compile(lossless._unpack, {"out": "*i64", "out_bits": "*i16"}, PERMUTES=True, WORDS=lossless._WORDS, ESCAPES=lossless._ESCAPES).asm["ptx"]
assert re.search("ld.global[^;]*v4.b32", ptx) and "st.global.v2.b64" in ptx, "16 bytes a thread at a time"
for has_numbers, out in ((False, "*i16"), (True, "*i16"), (True, "*bf16")):
    types = {"out": out} if has_numbers else {"out": out, "numbers": "*i32"}
    compile(lossless._decode_rows, types, warps=2, HAS_NUMBERS=has_numbers, PERMUTES=True, GROUPS=4)
    compile(lossless._put_escapes, types, warps=2, HAS_NUMBERS=has_numbers, BLOCK=32)
"""


@pytest.mark.process
@pytest.mark.cpu_only
@pytest.mark.timeout(900)
def test_products_compile_for_hopper_within_their_budget() -> None:
    print(run_compiling(SCRIPT))
