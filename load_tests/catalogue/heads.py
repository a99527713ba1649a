"""The catalogue's entries between projection and attention: rotation, cache writes, and both in one."""

import torch
from torch import Tensor

from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, Target, size
from load_tests.catalogue.paged_cases import Heads, empty_arena
from pilotlight.kernels.attention.fp8_cache import FP8, LARGEST
from pilotlight.kernels.elementwise import kv_write, qkv, rotary

_BANDWIDTH = Target(0.85, "copy")
_EPS = 1e-6
_LAYERS = 2


def _angles(tokens: int, head_dim: int) -> Arguments:
    angles = torch.rand(tokens, head_dim // 2) * 6
    return {"cos": angles.cos(), "sin": angles.sin()}


def _caches(num_blocks: int, heads: Heads, dtype: torch.dtype) -> Arguments:
    """Return one layer of an arena of zeros."""
    arena = empty_arena(num_blocks, _LAYERS, heads, dtype).zero_()
    return {"k_cache": arena[:, 1, 0], "v_cache": arena[:, 1, 1]}


def _written(tokens: int, heads: Heads, dtype: torch.dtype, fp8: bool) -> Arguments:
    """Return caches, and random slots for the tokens. Some keys and values exceed FP8's range."""
    num_blocks = -(-tokens // heads.block_size) + 3
    made = _caches(num_blocks, heads, FP8 if fp8 else dtype)
    made["slot_mapping"] = torch.randperm(num_blocks * heads.block_size)[:tokens]
    made["kv_scales"] = torch.tensor([0.03, 0.005]) if fp8 else None
    return made


def _rotary(tokens: int, heads: int, head_dim: int, target: Target | None = None, is_interleaved: bool = False) -> Case:
    """Make a case of some heads of a projection; in memory the other heads are between two tokens."""

    def make(dtype: torch.dtype) -> Arguments:
        x = torch.randn(tokens, heads + 2, head_dim).to(dtype)[:, :heads]
        return {"x": x, "is_interleaved": is_interleaved} | _angles(tokens, head_dim)

    return Case(f"{tokens} x {heads} x {head_dim}" + (", interleaved" if is_interleaved else ""), make, target)


def _kv_write(tokens: int, heads: Heads, fp8: bool, target: Target | None = None) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        projected = torch.randn(tokens, heads.heads + 2 * heads.kv_heads, heads.head_dim).to(dtype)
        _, k, v = torch.split(projected, [heads.heads, heads.kv_heads, heads.kv_heads], dim=1)
        return {"k": k, "v": v} | _written(tokens, heads, dtype, fp8)

    return Case(f"{tokens} tokens, {heads}" + (", fp8" if fp8 else ""), make, target)


def _fused(
    tokens: int,
    heads: Heads,
    norm: bool,
    fp8: bool = False,
    gap: int = 0,
    target: Target | None = None,
    pairs: int | None = None,
    has_gates: bool = False,
) -> Case:
    """Make a case.

    `gap`: padding columns between two tokens' heads; `pairs`: rotated pairs of a head, None for all.
    """

    def make(dtype: torch.dtype) -> Arguments:
        all_heads = heads.heads * (1 + has_gates) + 2 * heads.kv_heads
        rows = torch.randn(tokens, all_heads * heads.head_dim + gap).to(dtype)[:, : all_heads * heads.head_dim]
        weight = torch.randn(heads.heads + heads.kv_heads, heads.head_dim).to(dtype) if norm else None
        return (
            {"qkv": rows.view(tokens, all_heads, heads.head_dim), "norm": weight, "eps": _EPS}
            | _angles(tokens, heads.head_dim if pairs is None else 2 * pairs)
            | _written(tokens, heads, dtype, fp8)
            | {"has_gates": has_gates}
        )

    kinds = (", normed" if norm else "") + (", fp8" if fp8 else "") + (", strided" if gap else "")
    kinds += (f", {pairs} pairs" if pairs is not None else "") + (", gated" if has_gates else "")
    return Case(f"{tokens} tokens, {heads}{kinds}", make, target)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, is_interleaved: bool = False) -> Tensor:
    pairs = (
        torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)).contiguous())
        if is_interleaved
        else torch.complex(*x.chunk(2, dim=-1))
    )
    pairs = pairs * torch.complex(cos, sin).unsqueeze(1)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def _kept(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, kv_scales: Tensor | None
) -> None:
    for place, x, scale in zip((k_cache, v_cache), (k, v), (1.0, 1.0) if kv_scales is None else kv_scales, strict=True):
        stored = x if kv_scales is None else (x / scale).clamp(-LARGEST, LARGEST)
        for slot, row in zip(slot_mapping.tolist(), stored, strict=True):
            place[slot // place.shape[1], slot % place.shape[1]] = row


def _normed_turned_kept(
    qkv: Tensor, norm: Tensor | None, eps: float, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor,
    kv_scales: Tensor | None, has_gates: bool,
) -> Tensor:  # fmt: skip
    kv_heads = k_cache.shape[2]
    if has_gates:
        gated = qkv.shape[1] - 2 * kv_heads
        qkv = torch.cat((torch.unflatten(qkv[:, :gated], 1, (-1, 2))[:, :, 0], qkv[:, gated:]), dim=1)
    heads = qkv.shape[1] - 2 * kv_heads
    qk = qkv[:, : heads + kv_heads]
    if norm is not None:
        qk = qk / (qk.square().mean(-1, keepdim=True) + eps).sqrt() * norm
    turning = 2 * cos.shape[1]
    if turning:
        qk = torch.cat((_turned(qk[..., :turning], cos, sin), qk[..., turning:]), dim=-1)
    _kept(qk[:, heads:], qkv[:, heads + kv_heads :], k_cache, v_cache, slot_mapping, kv_scales)
    return qk[:, :heads]


def _rotary_cost(arguments: Arguments) -> Cost:
    return Cost(2 * size(arguments["x"]) + size(arguments["cos"], arguments["sin"]))


def _kv_write_cost(arguments: Arguments) -> Cost:
    k, width = arguments["k"], arguments["k_cache"].element_size()
    return Cost(2 * size(k) + 2 * k.numel() * width + size(arguments["slot_mapping"]))


def _fused_cost(arguments: Arguments) -> Cost:
    qkv, k_cache = arguments["qkv"], arguments["k_cache"]
    kept = 2 * qkv.shape[0] * k_cache.shape[2] * k_cache.shape[3]
    asked = (qkv.shape[1] // (1 + arguments["has_gates"])) * qkv.shape[0] * qkv.shape[2] - kept
    small = size(arguments["cos"], arguments["sin"], arguments["slot_mapping"], arguments["norm"])
    return Cost(size(qkv) + asked * qkv.element_size() + kept * k_cache.element_size() + small)


_PLAIN, _ODD, _LARGE = Heads(4, 2, 16, 16), Heads(5, 1, 10, 3), Heads(32, 8, 128, 16)
_BY_TOKEN = Heads(6, 3, 10, 4, by_token=True)

# Tolerance: in the storage type, the rounding of the result; in fp32, those of two products and their sum.
ROTARY = Operation(
    name="rotary",
    function=rotary.rotary,
    reference=_turned,
    roundings=1,
    arithmetic=2,
    cases=(
        _rotary(0, 2, 8),
        _rotary(1, 1, 2),
        _rotary(4, 3, 10),
        _rotary(3, 5, 84),
        _rotary(4, 3, 10, is_interleaved=True),
        _rotary(3, 5, 64, is_interleaved=True),
    ),
    bench=(_rotary(64, 40, 128, _BANDWIDTH), _rotary(4096, 40, 128, _BANDWIDTH)),
    cost=_rotary_cost,
)
# Tolerance: none for a copy; the rounding of the result for an FP8 cache.
KV_WRITE = Operation(
    name="kv_write",
    function=kv_write.kv_write,
    reference=_kept,
    roundings=0,
    cases=tuple(_kv_write(tokens, heads, fp8) for tokens, heads in ((0, _PLAIN), (6, _PLAIN), (9, _BY_TOKEN), (23, _ODD)) for fp8 in (False, True)),
    bench=tuple(_kv_write(4096, _LARGE, fp8, _BANDWIDTH) for fp8 in (False, True)),
    cost=_kv_write_cost,
    changes=("k_cache", "v_cache"),
)  # fmt: skip
# Tolerance: in the storage type, a rounding between norm and rotation and one at the end; in fp32, those of norm and rotation.
ROTATE_AND_CACHE = Operation(
    name="rotate_and_cache",
    function=qkv.rotate_and_cache,
    reference=_normed_turned_kept,
    roundings=2,
    arithmetic=4,
    cases=(
        _fused(0, _PLAIN, norm=False),
        _fused(6, _PLAIN, norm=False),
        _fused(6, _PLAIN, norm=True),
        _fused(7, _ODD, norm=True, gap=5),
        _fused(7, _ODD, norm=False, gap=5),
        _fused(3, Heads(17, 3, 42, 4), norm=True),
        _fused(1, _LARGE, norm=True),
        _fused(9, _BY_TOKEN, norm=True),
        _fused(6, _PLAIN, norm=True, fp8=True),
        _fused(23, _ODD, norm=False, fp8=True),
        _fused(6, _PLAIN, norm=True, pairs=3),
        _fused(7, _ODD, norm=False, gap=5, pairs=2),
        _fused(6, _PLAIN, norm=False, pairs=0),
        _fused(9, _BY_TOKEN, norm=True, pairs=2, has_gates=True),
        _fused(3, _LARGE, norm=True, fp8=True, pairs=16, has_gates=True),
        _fused(2, _ODD, norm=False, has_gates=True),
    ),
    bench=(
        _fused(64, _LARGE, norm=False, target=_BANDWIDTH),
        _fused(4096, _LARGE, norm=False, target=_BANDWIDTH),
        _fused(4096, _LARGE, norm=True, target=_BANDWIDTH),
        _fused(4096, _LARGE, norm=False, fp8=True, target=_BANDWIDTH),
    ),
    cost=_fused_cost,
    changes=("k_cache", "v_cache"),
    scratch=("qkv",),
)
OPERATIONS = (ROTARY, KV_WRITE, ROTATE_AND_CACHE)
