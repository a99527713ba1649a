"""The C library's operations on tensors; each returns None for arguments that C cannot take.

kernels/dispatch.py calls them if the first argument is on a CPU, and computes with torch on None. One condition in each checks what its C code
assumes (CPU, one storage type, contiguous rows, sizes that agree), since C does not check addresses; after it comes only the call. Attention of
prompts, of drafts and to latent vectors gets arguments that the operation has checked. Tensors are
queried in the cheapest way: all strides at once take 0.14 us, a single one 0.25, the shape 0.15 and the number of elements 0.07; empty_like takes 0.7
us, new_empty 1.1. Nothing here can be differentiated.
"""

import torch
from torch import Tensor, empty_like, get_num_threads

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.fp8_cache import FP8
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.cpu.crossover import UNLIMITED
from pilotlight.kernels.cpu.functions import Function

_FP32, _INT64 = torch.float32, torch.int64
SILU, GELU_TANH = 1, 2  # the numbers of the activations in activation.h

# These limits keep a thread's stack small. It holds the sums of all heads of a sequence; for prompts, tiles of up to 96 KiB per 64 of head_dim.
_MAX_HEAD_FLOATS = 1 << 16
_MAX_TILED_HEAD_DIM = 512


def linear(
    library: Library,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: int = 0,
    wide_output: bool = False,
) -> Tensor | None:
    """Multiply x [rows, columns] by weight [outputs, columns]; return [rows, outputs].

    With an activation, weight has twice the rows: gates, then ups. `wide_output`: return the result as fp32.
    """
    dtype = x.dtype
    if dtype not in library.most_rows:
        return None
    shape, weight_shape = x.shape, weight.shape
    if len(shape) != 2 or len(weight_shape) != 2:
        return None
    rows, columns = shape
    weight_rows, weight_columns = weight_shape
    row_stride, column_stride = x.stride()
    p_x, p_weight, p_bias = x.data_ptr(), weight.data_ptr(), 0
    if (
        rows > library.most_rows[dtype]
        or not weight.is_cpu
        or weight.dtype != dtype
        or weight_columns != columns
        or column_stride != 1
        or not weight.is_contiguous()
        or not columns
        or (activation and weight_rows & 1)
    ):
        return None
    if bias is not None:
        p_bias = bias.data_ptr()
        if bias.dtype != dtype or bias.numel() != weight_rows or not (bias.is_cpu and bias.is_contiguous()):
            return None
    if (p_x | p_weight | p_bias) & (x.itemsize - 1):
        return None
    outputs = weight_rows >> 1 if activation else weight_rows
    y = x.new_empty((rows, outputs), dtype=_FP32) if wide_output else x.new_empty((rows, outputs))
    lacks_memory = library.function_of(rows, dtype)(
        p_x, p_weight, p_bias or None, y.data_ptr(), rows, outputs, columns, row_stride, activation, wide_output, get_num_threads()
    )  # fmt: skip
    return None if lacks_memory else y


def rows_of(library: Library, table: Tensor, numbers: Tensor, scale: float = 1.0) -> Tensor | None:
    """Return the rows `numbers` [n] of table [rows, size], times `scale`, as [n, size]."""
    function = library.rows_of.get(table.dtype)
    p_table, p_numbers = table.data_ptr(), numbers.data_ptr()
    if (
        function is None
        or table.ndim != 2
        or numbers.ndim != 1
        or numbers.dtype != _INT64
        or not (numbers.is_cpu and table.is_contiguous() and numbers.is_contiguous())
        or p_table & (table.itemsize - 1)
        or p_numbers & 7
    ):
        return None
    table_rows, size = table.shape
    rows = numbers.shape[0]
    if not table_rows:
        return None
    y = table.new_empty((rows, size))
    function(p_table, p_numbers, y.data_ptr(), rows, size, table_rows, scale, get_num_threads())
    return y


def rms_norm(library: Library, x: Tensor, weight: Tensor, eps: float) -> Tensor | None:
    """Normalise x [rows, size]."""
    found = add_rms_norm(library, x, None, weight, eps)
    return None if found is None else found[0]


def add_rms_norm(
    library: Library, x: Tensor, added: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor] | None:
    """Return (norm(x + added), x + added) for x and added [rows, size]."""
    dtype = x.dtype
    function = library.rms_norm.get(dtype)
    shape = x.shape
    if function is None or len(shape) != 2 or not x.is_contiguous():
        return None
    rows, size = shape
    weight_dtype = weight.dtype
    p_x, p_added, p_weight = x.data_ptr(), 0, weight.data_ptr()
    if (
        not size
        or weight.numel() != size
        or (weight_dtype != dtype and weight_dtype != _FP32)
        or not (weight.is_cpu and weight.is_contiguous())
        or p_weight & (weight.itemsize - 1)
    ):
        return None
    if added is not None:
        p_added = added.data_ptr()
        if added.dtype != dtype or added.shape != shape or not (added.is_cpu and added.is_contiguous()):
            return None
    if (p_x | p_added) & (x.itemsize - 1):
        return None
    y = empty_like(x)
    sums = x if added is None else empty_like(x)
    function(
        p_x, p_added or None, p_weight, y.data_ptr(), sums.data_ptr(), rows, size, weight_dtype != dtype, eps, get_num_threads()
    )  # fmt: skip
    return y, sums


def rotate_and_cache(
    library: Library,
    qkv: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    kv_scales: Tensor | None = None,
    has_gates: bool = False,
) -> Tensor | None:
    """Rotate qkv [tokens, heads + 2 * kv_heads, head_dim] in place and cache keys and values.

    Return a view of its queries, or a copy if there are gates between them.
    """
    dtype = qkv.dtype
    function = library.rotate_and_cache.get(dtype)
    shape = qkv.shape
    if function is None or len(shape) != 3 or not qkv.is_contiguous():
        return None
    tokens, all_heads, head_dim = shape
    cache = _cache_of(k_cache, v_cache, dtype, head_dim, kv_scales)
    if cache is None:
        return None
    block_size, kv_heads, strides = cache
    heads = all_heads - 2 * kv_heads
    if has_gates:
        if heads & 1:
            return None
        heads >>= 1
    if cos.ndim != 2:
        return None
    half = cos.shape[1]
    angles = tokens * half
    p_qkv, p_cos, p_sin, p_slots, p_norm = qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), 0
    if (
        head_dim & 1
        or 2 * half > head_dim
        or heads <= 0
        or cos.numel() != angles
        or sin.numel() != angles
        or slots.ndim != 1
        or slots.shape[0] != tokens
        or cos.dtype != _FP32
        or sin.dtype != _FP32
        or slots.dtype != _INT64
        or not (cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous())
        or not (cos.is_cpu and sin.is_cpu and slots.is_cpu)
        or (p_cos | p_sin) & 3
        or p_slots & 7
        or p_qkv & (qkv.itemsize - 1)
    ):
        return None
    if norm is not None:
        p_norm = norm.data_ptr()
        if (
            (norm.dtype != dtype and norm.dtype != _FP32)
            or norm.numel() != (heads + kv_heads) * head_dim
            or not (norm.is_cpu and norm.is_contiguous())
            or p_norm & (norm.itemsize - 1)
        ):
            return None
    queries = qkv.new_empty((tokens, heads, head_dim)) if has_gates else None
    function(
        p_qkv, None if queries is None else queries.data_ptr(), p_cos, p_sin, p_slots, k_cache.data_ptr(), v_cache.data_ptr(), p_norm or None,
        tokens, heads, kv_heads, head_dim, half, block_size, *strides, norm is not None and norm.dtype != dtype, eps,
        None if kv_scales is None else kv_scales.data_ptr(), get_num_threads(),
    )  # fmt: skip
    return qkv[:, :heads] if queries is None else queries


def gated_activation(library: Library, x: Tensor, activation: int) -> Tensor | None:
    """Apply the activation to x [tokens, 2 * size]; return [tokens, size]."""
    function = library.gated_activation.get(x.dtype)
    if function is None or x.ndim != 2 or not x.is_contiguous():
        return None
    tokens, columns = x.shape
    p_x = x.data_ptr()
    if columns & 1 or p_x & (x.itemsize - 1):
        return None
    y = x.new_empty((tokens, columns >> 1))
    function(p_x, y.data_ptr(), tokens, columns >> 1, activation, get_num_threads())
    return y


def apply_gate(library: Library, x: Tensor, gates: Tensor, by_sigmoid: bool) -> Tensor | None:
    """Multiply x [tokens, groups, numbers] by its gates; return [tokens, groups, numbers]."""
    function = library.apply_gate.get(x.dtype)
    if function is None or x.ndim != 3 or gates.dtype != x.dtype or gates.shape != x.shape or not gates.is_cpu:
        return None
    (x_token, x_group, x_number), (gates_token, gates_group, gates_number) = x.stride(), gates.stride()
    p_x, p_gates = x.data_ptr(), gates.data_ptr()
    if x_number != 1 or gates_number != 1 or (p_x | p_gates) & (x.itemsize - 1):
        return None
    y = x.new_empty(x.shape)
    function(
        p_x, p_gates, y.data_ptr(), *x.shape, x_token, x_group, gates_token, gates_group, by_sigmoid, get_num_threads()
    )  # fmt: skip
    return y


def add_lora(
    library: Library, y: Tensor, x: Tensor, adapters: Tensor, places: Tensor, slots: Tensor, ends: tuple[int, ...]
) -> Tensor | None:
    """Compute add_lora of kernels/lora.py; y is changed in place."""
    dtype = x.dtype
    function = library.add_lora.get(dtype)
    if function is None or x.ndim != 2 or y.ndim != 2 or places.ndim != 3:
        return None
    tokens, columns = x.shape
    outputs, parts = y.shape[1], len(ends)
    row_stride, column_stride = x.stride()
    slot_stride, part_stride, place_stride = places.stride()
    p_y, p_x, p_adapters = y.data_ptr(), x.data_ptr(), adapters.data_ptr()
    p_numbers = places.data_ptr() | slots.data_ptr()
    if (
        y.shape[0] != tokens
        or not 0 < parts <= 3
        or ends[-1] != outputs
        or places.shape[1:] != (parts, 3)
        or y.dtype != dtype
        or adapters.dtype != dtype
        or places.dtype != _INT64
        or slots.dtype != _INT64
        or slots.ndim != 1
        or slots.shape[0] != tokens
        or column_stride != 1
        or (part_stride, place_stride) != (3, 1)
        or not (y.is_contiguous() and adapters.is_contiguous() and slots.is_contiguous())
        or not (y.is_cpu and x.is_cpu and adapters.is_cpu and places.is_cpu and slots.is_cpu)
        or (p_y | p_x | p_adapters) & (x.itemsize - 1)
        or p_numbers & 7
    ):
        return None
    if not tokens:
        return y
    end0, end1, end2 = (*ends, 0, 0)[:3]
    done = function(
        p_y, p_x, p_adapters, places.data_ptr(), slots.data_ptr(), tokens, outputs, columns, row_stride, adapters.numel(), places.shape[0],
        slot_stride, parts,
        end0, end1, end2, get_num_threads(),
    )  # fmt: skip
    return y if done else None


def decode_attention(
    library: Library,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    max_context_len: int,
    rule: AttentionRule,
) -> Tensor | None:
    """Compute decode_attention (kernels/attention/decode_attention.py).

    q may be strided between sequences.
    """
    dtype = q.dtype
    function = library.decode_attention.get(dtype)
    scale, window, sinks, soft_cap, kv_scales, is_chunked = rule
    if function is None or soft_cap is not None or is_chunked or not scale > 0 or len(shape := q.shape) != 3:
        return None
    seqs, heads, head_dim = shape
    q_seq, q_head, q_column = q.stride()
    cache = _cache_of(k_cache, v_cache, dtype, head_dim, kv_scales)
    if cache is None:
        return None
    block_size, kv_heads, strides = cache
    p_q, p_tables, p_lens = q.data_ptr(), block_tables.data_ptr(), context_lens.data_ptr()
    if (
        q_head != head_dim
        or q_column != 1
        or not kv_heads
        or not heads
        or heads % kv_heads
        or heads * head_dim > _MAX_HEAD_FLOATS
        or block_tables.ndim != 2
        or block_tables.dtype != _INT64
        or context_lens.dtype != _INT64
        or context_lens.numel() != seqs
        or not (block_tables.is_contiguous() and context_lens.is_contiguous())
        or not (block_tables.is_cpu and context_lens.is_cpu)
        or (p_tables | p_lens) & 7
        or p_q & (q.itemsize - 1)
        or (window is not None and window <= 0)
        or (sinks is not None and not _are_sinks(sinks, heads, dtype))
    ):
        return None
    table_rows, max_blocks = block_tables.shape
    if table_rows != seqs or not 0 < max_context_len <= max_blocks * block_size:
        return None
    out = q.new_empty(shape)
    function(
        p_q, k_cache.data_ptr(), v_cache.data_ptr(), p_tables, p_lens, None if sinks is None else sinks.data_ptr(), out.data_ptr(),
        seqs, q_seq, max_blocks, heads, kv_heads, head_dim, block_size, *strides, window or 0, scale,
        None if kv_scales is None else kv_scales.data_ptr(), get_num_threads(),
    )  # fmt: skip
    return out


def prefill_attention(
    library: Library, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: VarlenBatch, rule: AttentionRule
) -> Tensor | None:
    """Compute prefill_attention (kernels/attention/prefill_attention.py). q may be strided between tokens."""
    if q.shape[2] > _MAX_TILED_HEAD_DIM or _is_left_to_torch(library, q.dtype, batch, rule):
        return None
    last_visible = None if batch.last_visible is None else batch.last_visible.data_ptr()
    return _attend_varlen(library.prefill_attention.get(q.dtype), q, k_cache, v_cache, batch, rule, last_visible)


def _is_left_to_torch(library: Library, dtype: torch.dtype, batch: VarlenBatch, rule: AttentionRule) -> bool:
    most = library.most_queries.get(dtype, UNLIMITED)
    return rule.window is None and not rule.is_naive and max(batch.host_q_lens, default=0) > most


def verify_attention(
    library: Library, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: VarlenBatch, rule: AttentionRule
) -> Tensor | None:
    """Compute verify_attention (kernels/attention/verify_attention.py).

    Each token's result equals that of decode_attention to the bit. q may be strided between tokens.
    """
    _, heads, head_dim = q.shape
    if max(batch.host_q_lens, default=0) * heads * head_dim > _MAX_HEAD_FLOATS:
        return None
    return _attend_varlen(library.verify_attention.get(q.dtype), q, k_cache, v_cache, batch, rule)


def _attend_varlen(
    function: Function | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: VarlenBatch,
    rule: AttentionRule,
    *further: int | None,
) -> Tensor | None:
    """`further`: addresses that only this function takes."""
    dtype = q.dtype
    scale, window, sinks, soft_cap, kv_scales, is_chunked = rule
    if function is None or soft_cap is not None or is_chunked:
        return None
    tokens, heads, head_dim = q.shape
    q_token, q_head, _ = q.stride()
    tables, starts, context_lens = batch.block_tables, batch.cu_seqlens_q, batch.context_lens
    cache = _cache_of(k_cache, v_cache, dtype, head_dim, kv_scales)
    if (
        cache is None
        or q_head != head_dim
        or not tables.is_contiguous()
        or (sinks is not None and not _are_sinks(sinks, heads, dtype))
    ):
        return None
    block_size, kv_heads, strides = cache
    out = q.new_empty((tokens, heads, head_dim))
    function(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), tables.data_ptr(), starts.data_ptr(), context_lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(), out.data_ptr(), tables.shape[0], q_token, tables.shape[1], heads, kv_heads, head_dim,
        block_size, *strides, window or 0, scale,
        None if kv_scales is None else kv_scales.data_ptr(), *further, get_num_threads(),
    )  # fmt: skip
    return out


def latent_attention(
    library: Library,
    q_latent: Tensor,
    q_rotary: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    positions: Tensor | None,
    lens: Tensor,
    scale: float,
    cache_scale: Tensor | None = None,
) -> Tensor | None:
    """Compute mla_decode or, with positions, mla_selected (kernels/attention/mla.py).

    Each token reads the first `lens` tokens of its context, or of its row of positions.
    """
    tokens, heads, latent = q_latent.shape
    function = library.latent_attention.get(q_latent.dtype)
    if function is None or heads * latent > _MAX_HEAD_FLOATS:
        return None
    out = torch.empty(q_latent.shape, dtype=q_latent.dtype)
    if not tokens:
        return out
    q = torch.cat((q_latent, q_rotary), dim=2)
    table_stride = block_tables.stride(0) if block_tables.shape[0] == tokens else 0
    function(
        q.data_ptr(), cache.data_ptr(), block_tables.data_ptr(), lens.data_ptr(), None if positions is None else positions.data_ptr(),
        None if cache_scale is None else cache_scale.data_ptr(), out.data_ptr(), tokens, heads, latent, q.shape[2], table_stride,
        0 if positions is None else positions.stride(0), cache.shape[1], *cache.stride()[:2], scale, get_num_threads(),
    )  # fmt: skip
    return out


def _cache_of(
    k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype, head_dim: int, kv_scales: Tensor | None
) -> tuple[int, int, tuple[int, int, int]] | None:
    """Return block size, heads, and the strides of blocks, tokens and heads.

    None if C cannot read the caches. C needs contiguous heads, equal strides of both caches, and values of type `dtype`, or FP8 with scales.
    """
    shape, strides = k_cache.shape, k_cache.stride()
    if len(shape) != 4 or strides != v_cache.stride() or shape != v_cache.shape:
        return None
    _, block_size, kv_heads, cached_dim = shape
    block_stride, token_stride, head_stride, column_stride = strides
    if kv_scales is not None:
        if kv_scales.dtype != _FP32 or kv_scales.shape != (2,) or not (kv_scales.is_cpu and kv_scales.is_contiguous()):
            return None
        dtype = FP8
    if (
        k_cache.dtype != dtype
        or v_cache.dtype != dtype
        or cached_dim != head_dim
        or column_stride != 1
        or not (k_cache.is_cpu and v_cache.is_cpu)
        or (k_cache.data_ptr() | v_cache.data_ptr()) & (k_cache.itemsize - 1)
    ):
        return None
    return block_size, kv_heads, (block_stride, token_stride, head_stride)


def _are_sinks(sinks: Tensor, heads: int, dtype: torch.dtype) -> bool:
    if sinks.dtype != dtype or sinks.numel() != heads or not (sinks.is_cpu and sinks.is_contiguous()):
        return False
    return not sinks.data_ptr() & (sinks.itemsize - 1)
