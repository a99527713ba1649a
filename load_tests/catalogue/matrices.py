"""The catalogue's entries of products with packed weights."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import cycle

import torch
from torch import Tensor

from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, Target, size
from pilotlight.kernels.matrices import fp8, int4, linear, lossless, mxfp4
from pilotlight.kernels.matrices.fp8 import Fp8Weight
from pilotlight.kernels.matrices.int4 import Int4Weight
from pilotlight.kernels.matrices.lossless import LosslessWeight, num_palettes, pack_lossless, row_bytes
from pilotlight.kernels.matrices.mxfp4 import Mxfp4Weight
from pilotlight.kernels.matrices.plain import PlainWeight
from pilotlight.kernels.matrices.weight import Weight

_READ = Target(0.8, "read")
_L2_BYTES = 128 << 20  # more than twice the L2 cache of an H100
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def random_int4(shape: tuple[int, ...], group: int, *, zeros: bool, dtype: torch.dtype) -> Int4Weight:
    *leading, columns = shape
    groups = -(-columns // group)
    codes = torch.randint(0, 256, (*leading, -(-columns // 32) * 16), dtype=torch.uint8)
    # scales as a quantizer makes them: of one sign and similar size
    scales = ((torch.rand(*leading, groups) + 0.5) / 8).to(dtype)
    return Int4Weight(
        codes, scales, torch.randint(0, 16, (*leading, groups), dtype=torch.uint8) if zeros else None, columns, group
    )


def random_mxfp4(shape: tuple[int, ...]) -> Mxfp4Weight:
    *leading, columns = shape
    codes = torch.randint(0, 256, (*leading, columns // 2), dtype=torch.uint8)
    return Mxfp4Weight(codes, torch.randint(119, 124, (*leading, columns // 32), dtype=torch.uint8))


def random_fp8(shape: tuple[int, ...], row_group: int, column_group: int, *, measured: bool = False) -> Fp8Weight:
    *leading, rows, columns = shape
    values = torch.randn(shape).mul_(50).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = (torch.rand(*leading, -(-rows // row_group), -(-columns // column_group)) + 0.5) / 100
    return Fp8Weight(values, scales, row_group, column_group, torch.full((1,), 0.01) if measured else None)


def random_lossless(rows: int, columns: int, escapes: int) -> LosslessWeight:
    """Make a random weight with `escapes` escapes, evenly spaced, in the rows of each whole palette.

    An escape is a value larger or smaller than those of the palette.
    """
    palettes = num_palettes(rows)
    signs_and_exponents = torch.arange(16) % 8 + 0x37 + torch.arange(16) // 8 * 0x80
    place = torch.arange(escapes) * (8 * columns // escapes)
    its_row, its_column = place // columns, place % columns
    one = its_row << 29 | its_column << 8 | torch.where(place % 2 == 0, 0x40, 0x20)
    codes = torch.randint(0, 256, (rows, row_bytes(columns)), dtype=torch.uint8)
    every_row = (torch.arange(palettes)[:, None] * 8 + its_row).flatten()
    byte, shift = (part.repeat(palettes) for part in _place_of(its_column))
    codes[every_row, byte] &= ~(15 << shift).to(
        torch.uint8
    )  # at the place of an escape, the code is the palette's first
    return LosslessWeight(
        codes,
        signs_and_exponents.to(torch.uint8).expand(palettes, -1).contiguous(),
        (torch.arange(palettes + 1) * escapes).to(torch.int32),
        one.to(torch.int32).repeat(palettes),
        columns,
    )


def plain_weight(weight: Weight) -> Tensor:
    """Unpack a weight value by value, following the description of its format."""
    if isinstance(weight, PlainWeight):
        return weight.values
    if isinstance(weight, LosslessWeight):
        return _of_bytes(weight)
    if isinstance(weight, Fp8Weight):
        rows, columns = (torch.arange(n, device=weight.values.device) for n in weight.values.shape[-2:])
        return weight.values * weight.scales[..., rows[:, None] // weight.row_group, columns // weight.column_group]
    assert isinstance(weight, Int4Weight | Mxfp4Weight)
    column = torch.arange(weight.columns, device=weight.codes.device)
    codes = weight.codes[..., column // 32 * 16 + column % 16].int() >> (column % 32 // 16 * 4) & 15
    if isinstance(weight, Mxfp4Weight):
        magnitude = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)[codes & 7]
        return magnitude * (1 - (codes >> 3) * 2) * (2.0 ** (weight.scales[..., column // 32].double() - 127))
    zeros = 8 if weight.zeros is None else weight.zeros[..., column // weight.group].int()
    values = (codes - zeros) * weight.scales[..., column // weight.group]
    if weight.permutation is None:
        return values
    return torch.empty_like(values).index_copy_(-1, weight.permutation, values)


def _place_of(column: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bytes of a row that hold these columns, and the bit at which each starts."""
    byte = column // 128 * 192 + column % 32 // 8 * 16 + column % 64 // 32 * 8 + column % 8
    return byte, column % 128 // 64 * 4


def _of_bytes(weight: LosslessWeight) -> Tensor:
    rows, columns = weight.shape
    row, column = (torch.arange(n, device=weight.codes.device) for n in (rows, columns))
    byte, shift = _place_of(column)
    places = weight.codes[:, byte].int() >> shift & 15
    high = weight.palettes[row[:, None] // 8, places].int()
    group = torch.repeat_interleave(torch.arange(num_palettes(rows), device=byte.device), weight.starts.diff())
    escapes = weight.escapes[: len(group)]
    high[group * 8 + (escapes >> 29 & 7), escapes >> 8 & 0x1FFFFF] = escapes & 255
    bits = high << 8 | weight.codes[:, byte + 64 + column % 128 // 64 * 64].int()
    return (bits << 16).view(torch.float32).double()


def _product(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    product = x @ plain_weight(weight).mT
    return product if bias is None else product + bias


def _plain_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x @ weight.T if bias is None else x @ weight.T + bias


def _fp8_product(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    columns = x.shape[1]
    values, scales = _quantised(x, columns if weight.column_group >= columns else 128, weight.input_scale)
    group = torch.arange(columns, device=x.device) // (columns if scales.shape[1] == 1 else 128)
    return _product(values * scales[:, group], weight, bias)


def _quantised(x: Tensor, group: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    groups = torch.split(x, group, dim=1)
    if scale is None:
        scales = torch.stack([part.abs().amax(1).clamp(min=1e-12) / 448 for part in groups], dim=1)
    else:
        scales = scale.expand(x.shape[0], len(groups)).clone()
    parts = [(part / scales[:, i, None]).clamp(-448, 448) for i, part in enumerate(groups)]
    return torch.cat(parts, dim=1).to(torch.float8_e4m3fn).double(), scales


def _cost(arguments: Arguments) -> Cost:
    x, weight, bias = arguments["x"], arguments["weight"], arguments.get("bias")
    rows, parts = weight.shape[0], [weight] if isinstance(weight, Tensor) else weight.parts
    written = x.shape[0] * rows * x.element_size()
    return Cost(size(x, bias, *parts) + written, 2 * x.numel() * rows)


def _int4(
    tokens: int, rows: int, columns: int, group: int, *, zeros: bool = False, biased: bool = False, permuted: bool = False,
    target: Target | None = None,
) -> Case:  # fmt: skip
    def make(dtype: torch.dtype) -> Arguments:
        weight = random_int4((rows, columns), group, zeros=zeros, dtype=dtype)
        if permuted:
            weight = replace(weight, permutation=torch.randperm(columns))
        return {"x": torch.randn(tokens, columns).to(dtype), "weight": weight} | _bias(biased, rows, dtype)

    words = [f"{tokens} x {rows} x {columns}", f"by {group}"]
    words += [word for word, is_so in (("zeros", zeros), ("biased", biased), ("permuted", permuted)) if is_so]
    return Case(" ".join(words), make, target)


def _mxfp4(tokens: int, rows: int, columns: int, *, biased: bool = False, target: Target | None = None) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return {"x": torch.randn(tokens, columns).to(dtype), "weight": random_mxfp4((rows, columns))} | _bias(
            biased, rows, dtype
        )

    return Case(f"{tokens} x {rows} x {columns}" + (" biased" if biased else ""), make, target)


def _fp8(
    tokens: int, rows: int, columns: int, row_group: int, column_group: int, *, biased: bool = False, measured: bool = False,
    target: Target | None = None,
) -> Case:  # fmt: skip
    def make(dtype: torch.dtype) -> Arguments:
        weight = random_fp8((rows, columns), row_group, column_group, measured=measured)
        return {"x": torch.randn(tokens, columns).to(dtype), "weight": weight} | _bias(biased, rows, dtype)

    name = f"{tokens} x {rows} x {columns} by {row_group} x {column_group}"
    return Case(name + (" biased" if biased else "") + (" measured" if measured else ""), make, target)


def _lossless(tokens: int, rows: int, columns: int, *, outliers: int = 0, biased: bool = False) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        plain = torch.randn(rows, columns) / 8
        plain.view(-1)[torch.randperm(plain.numel())[:outliers]] *= 2.0**-12
        weight = pack_lossless(plain.to(torch.bfloat16))
        return {"x": torch.randn(tokens, columns).to(dtype), "weight": weight} | _bias(biased, rows, dtype)

    return Case(f"{tokens} x {rows} x {columns}" + (" biased" if biased else ""), make)


def _large_lossless(tokens: int, rows: int, columns: int) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        weight = random_lossless(rows, columns, escapes=8 * columns // 1000)
        return {"x": torch.randn(tokens, columns).to(dtype), "weight": weight}

    target = Target(1.2 if tokens == 1 else 1.0, "rival") if tokens <= 16 else None
    return Case(f"{tokens} x {rows} x {columns}", make, target)


def _quantise(tokens: int, columns: int, group: int, scale: float | None = None) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        given = None if scale is None else torch.full((1,), scale)
        return {"x": (torch.randn(tokens, columns + 3) * 3).to(dtype)[:, :columns], "group": group, "scale": given}

    return Case(f"{tokens} x {columns} by {group}" + ("" if scale is None else " given"), make, Target(0.7, "copy"))


def _gemv_case(tokens: int, rows: int, columns: int, *, biased: bool = False) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        weight = (torch.randn(rows, columns) / 8).to(dtype)
        return {"x": torch.randn(tokens, columns).to(dtype), "weight": weight} | _bias(biased, rows, dtype)

    return Case(f"{tokens} x {rows} x {columns}" + (" biased" if biased else ""), make, Target(0.85, "read"))


def _bias(biased: bool, rows: int, dtype: torch.dtype) -> Arguments:
    return {"bias": torch.randn(rows).to(dtype)} if biased else {}


@cache
def _unpacked(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """Return random weights in an endless cycle, which is larger than a GPU's cache."""
    one = rows * columns * dtype.itemsize
    copies = max(2, -(-_L2_BYTES // one)) if device.type == "cuda" else 1
    return cycle([torch.randn(rows, columns, dtype=dtype, device=device) for _ in range(copies)])


def _mm_of_unpacked(x: Tensor, weight: Int4Weight | Mxfp4Weight | LosslessWeight, bias: Tensor | None = None) -> Tensor:
    """Run the product with an unpacked weight for comparison; it is another weight, so the result differs."""
    return torch.mm(x, next(_unpacked(weight.codes.shape[0], weight.columns, x.dtype, x.device)).T)


def _scaled_mm(x: Tensor, weight: Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Run torch's product of the same operands, with activations rounded by our operation."""
    values, scales = fp8.quantise_fp8(x, x.shape[1])
    product: Tensor = torch._scaled_mm(
        values, weight.values.t(), scales, weight.scales.t(), bias=bias, out_dtype=x.dtype
    )
    return product


_MODELS = ((4096, 4096), (28672, 4096), (4096, 14336))  # outputs and inputs of Llama 3 8B's layers
_MODELS_32B = ((55296, 5120), (5120, 27648))  # outputs and inputs of Qwen 2.5 32B's largest layers
_FASTER = Target(2.5, "rival")  # compared with torch.mm and a weight of 16 bits

# Tolerance: in the storage type, the roundings of the unpacked weight and of the result; in fp32, those of one sum of a thousand terms.
INT4_LINEAR = Operation(
    name="int4_linear",
    function=int4.int4_linear,
    reference=_product,
    roundings=8,
    arithmetic=4,
    cases=(
        _int4(1, 48, 128, 128),
        _int4(3, 33, 431, 64, zeros=True, biased=True),
        _int4(2, 20, 1300, 128, zeros=True),
        _int4(9, 42, 320, 32, biased=True),
        _int4(16, 7, 1100, 128, permuted=True),
        _int4(5, 3, 77, 77, zeros=True),
        _int4(20, 36, 224, 64, biased=True),
        _int4(40, 70, 192, 64),
        _int4(70, 6, 96, 96, zeros=True, permuted=True),
        _int4(0, 8, 64, 32),
    ),
    bench=tuple(
        _int4(m, n, k, 128, target=_FASTER if m == 1 else _READ if m <= 16 else None) for n, k in _MODELS for m in (1, 2, 4, 8, 16, 32, 64, 512)
    ),
    cost=_cost,
    rivals={"torch.mm in 16 bits": _mm_of_unpacked},
)  # fmt: skip
MXFP4_LINEAR = Operation(
    name="mxfp4_linear",
    function=mxfp4.mxfp4_linear,
    reference=_product,
    roundings=8,
    cases=(_mxfp4(1, 48, 128), _mxfp4(4, 33, 1120, biased=True), _mxfp4(13, 5, 96), _mxfp4(33, 40, 320, biased=True), _mxfp4(0, 8, 32)),
    bench=tuple(_mxfp4(m, 5760, 2880, target=_FASTER if m == 1 else None) for m in (1, 8, 16, 512)),
    cost=_cost,
    rivals={"torch.mm in 16 bits": _mm_of_unpacked},
)  # fmt: skip
# Weights are exact bf16 values packed in 12 bits: the tolerance covers the rounding of the result, and fp32 sums of two thousand terms (measured on
# an H100: 11 unit roundoffs for 1,030 terms).
LOSSLESS_LINEAR = Operation(
    name="lossless_linear",
    function=lossless.lossless_linear,
    reference=_product,
    roundings=1,
    arithmetic=16,
    dtypes=(torch.float32, torch.bfloat16),
    cases=(
        _lossless(1, 48, 128),
        _lossless(1, 33, 431, outliers=200, biased=True),
        _lossless(2, 41, 1100, outliers=100),
        _lossless(3, 20, 2048, outliers=300, biased=True),
        _lossless(9, 42, 320, biased=True),
        _lossless(16, 7, 1030, outliers=500),
        _lossless(40, 70, 192, outliers=50, biased=True),
        _lossless(0, 8, 64),
    ),
    bench=(
        *(_large_lossless(m, n, k) for n, k in (*_MODELS, *_MODELS_32B) for m in (1, 2, 4, 8, 16, 512)),
        *(_large_lossless(m, n, k) for n, k in _MODELS for m in (64, 4096)),
    ),
    cost=_cost,
    rivals={"torch.mm in 16 bits": _mm_of_unpacked},
)
# The operation and its reference round activations to the same e4m3 value, unless fp32's rounding moves one across the middle between two. Tensor
# cores add FP8 products with 14 bits: an fp32 result would show that error, while the rounding of a 16-bit result hides it.
FP8_LINEAR = Operation(
    name="fp8_linear",
    function=fp8.fp8_linear,
    reference=_fp8_product,
    roundings=3,
    dtypes=(torch.float16, torch.bfloat16),
    cases=(
        _fp8(1, 48, 128, 1, 128),
        _fp8(3, 33, 1431, 33, 1431, biased=True),
        _fp8(20, 42, 300, 1, 300, measured=True),
        _fp8(70, 6, 96, 6, 96),
        _fp8(33, 80, 176, 1, 176, biased=True),
        _fp8(130, 96, 64, 96, 64, measured=True),
        _fp8(0, 8, 64, 1, 64),
    ),
    bench=tuple(_fp8(m, n, k, 1, k) for n, k in _MODELS for m in (1, 16, 512, 4096)),
    cost=_cost,
    rivals={"torch._scaled_mm": _scaled_mm},
)
FP8_BLOCK_LINEAR = Operation(
    name="fp8_block_linear",
    function=fp8.fp8_linear,
    reference=_fp8_product,
    roundings=3,
    dtypes=(torch.float16, torch.bfloat16),
    cases=(
        _fp8(2, 200, 300, 128, 128),
        _fp8(17, 129, 256, 128, 128, biased=True),
        _fp8(1, 10, 1300, 128, 128),
        _fp8(66, 130, 128, 64, 128),
    ),
    bench=tuple(_fp8(m, n, k, 128, 128) for n, k in _MODELS for m in (1, 16, 512, 4096)),
    cost=_cost,
)
# Values are compared as numbers: neighbours in e4m3 differ by more than any tolerance of the storage type.
QUANTISE_FP8 = Operation(
    name="quantise_fp8",
    function=fp8.quantise_fp8,
    reference=_quantised,
    roundings=2,
    cases=(
        _quantise(3, 300, 128),
        _quantise(2, 1500, 1500),
        _quantise(5, 42, 42, 0.004),
        _quantise(1, 1, 1),
        _quantise(0, 8, 8),
    ),
    bench=(_quantise(64, 4096, 128), _quantise(8192, 4096, 128), _quantise(8192, 7168, 7168)),
    cost=lambda arguments: Cost(size(arguments["x"]) + arguments["x"].numel()),
)
# The forms that `linear` may choose for a few rows. Tolerance in fp32: the roundings of one sum of a thousand terms.
FEW_ROWS = Operation(
    name="linear_of_few_rows",
    function=linear.linear,
    triton="matrices.linear.gemv",
    reference=_plain_product,
    roundings=8,
    cases=(
        _gemv_case(1, 48, 128),
        _gemv_case(1, 33, 1431, biased=True),
        _gemv_case(3, 42, 1100),
        _gemv_case(8, 20, 600, biased=True),
        _gemv_case(0, 4, 4),
    ),
    bench=tuple(_gemv_case(m, n, k) for n, k in _MODELS for m in (1, 2, 4, 8)),
    cost=_cost,
    rivals={"torch.mm": lambda x, weight, bias=None: torch.mm(x, weight.T)},
)
# The forms of `linear` for prompts, whose rows share the cost of loading a weight into the cache.
MANY_ROWS = Operation(
    name="linear_of_many_rows",
    function=linear.linear,
    triton="matrices.linear.gemv",
    reference=_plain_product,
    roundings=8,
    arithmetic=24,  # a sum of four thousand fp32 products, on a GPU without matrix units for fp32
    cases=(
        _gemv_case(33, 48, 128),
        _gemv_case(123, 42, 1431, biased=True),
        _gemv_case(70, 431, 6),
        _gemv_case(79, 1, 1031, biased=True),
        _gemv_case(97, 33, 4210),  # columns in several blocks
    ),
    bench=tuple(_gemv_case(512, n, k) for n, k in _MODELS),
    cost=_cost,
    rivals={"torch.mm": lambda x, weight, bias=None: torch.mm(x, weight.T)},
)
OPERATIONS = (
    FEW_ROWS,
    MANY_ROWS,
    LOSSLESS_LINEAR,
    INT4_LINEAR,
    MXFP4_LINEAR,
    FP8_LINEAR,
    FP8_BLOCK_LINEAR,
    QUANTISE_FP8,
)
