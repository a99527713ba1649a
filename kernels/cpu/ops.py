"""The C library's operations as functions of tensors: each answers None where the call is not for it, and torch computes instead.

Knows what the C code may assume (CPU, one storage type, contiguous rows) and checks it; refuses to know layers. Nothing here can be differentiated.
"""

import torch
from torch import Tensor, get_num_threads

from kernels.cpu import library as cpu
from kernels.varlen import VarlenBatch

SILU, GELU_TANH = 1, 2  # activation.h

# Rows of x up to which reading the weights as they lie beats oneDNN, which reorders them for every call. Zen 5, one thread, GFLOP/s, here and there:
# 340 and 174 at 16 rows, 384 and 373 at 64. In fp32 it is ahead at every size (twice at 16 rows).
_MAX_ROWS = {torch.float32: 1 << 30, torch.bfloat16: 64}
# What a thread keeps on its stack: the sums of all heads of a sequence; tiles of a prompt, up to 80 KiB for each 64 of head_dim.
_MAX_HEAD_FLOATS = 1 << 16
_MAX_TILED_HEAD_DIM = 512


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: int = 0, wide_output: bool = False
) -> Tensor | None:
    """x [rows, columns], weight [outputs, columns] -> [rows, outputs]; with an activation weight has twice the rows, gates above ups. `wide_output`:
    the result, rounded to x's type, as fp32."""
    if cpu.loaded is None:
        return None
    dtype = x.dtype
    function = cpu.loaded.linear.get(dtype)
    rows, columns = x.shape
    if (
        function is None
        or rows > _MAX_ROWS[dtype]
        or not x.is_cpu
        or weight.dtype != dtype
        or x.stride(1) != 1
        or not weight.is_contiguous()
        or not columns
        or (bias is not None and (bias.dtype != dtype or not bias.is_contiguous()))
    ):
        return None
    outputs = weight.shape[0] >> 1 if activation else weight.shape[0]
    y = x.new_empty((rows, outputs), dtype=torch.float32) if wide_output else x.new_empty((rows, outputs))
    function(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), rows, outputs, columns, x.stride(0), activation,
        wide_output, get_num_threads(),
    )  # fmt: skip
    return y


def rms_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
    """x, added [rows, size] -> (norm(x + added), x + added)."""
    if cpu.loaded is None:
        return None
    dtype = x.dtype
    function = cpu.loaded.rms_norm.get(dtype)
    if (
        function is None
        or not x.is_cpu
        or x.dim() != 2
        or not x.is_contiguous()
        or (weight.dtype != dtype and weight.dtype != torch.float32)
        or not weight.is_contiguous()
        or (added is not None and (added.dtype != dtype or not added.is_contiguous()))
    ):
        return None
    rows, size = x.shape
    y = x.new_empty((rows, size))
    sums = x if added is None else x.new_empty((rows, size))
    function(
        x.data_ptr(), None if added is None else added.data_ptr(), weight.data_ptr(), y.data_ptr(), sums.data_ptr(), rows, size,
        weight.dtype != dtype, eps, get_num_threads(),
    )  # fmt: skip
    return y, sums


def rotate_and_cache(
    qkv: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor | None:
    """qkv [tokens, heads + 2 * kv_heads, head_dim], changed in place -> its queries, a view."""
    if cpu.loaded is None:
        return None
    dtype = qkv.dtype
    function = cpu.loaded.rotate_and_cache.get(dtype)
    if (
        function is None
        or not qkv.is_cpu
        or not qkv.is_contiguous()
        or not _is_block_major(k_cache, v_cache, dtype)
        or not (cos.is_contiguous() and sin.is_contiguous() and slots.is_contiguous())
        or (norm is not None and ((norm.dtype != dtype and norm.dtype != torch.float32) or not norm.is_contiguous()))
    ):
        return None
    tokens, all_heads, head_dim = qkv.shape
    _, block_size, kv_heads, _ = k_cache.shape
    heads = all_heads - 2 * kv_heads
    function(
        qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(),
        None if norm is None else norm.data_ptr(), tokens, heads, kv_heads, head_dim, block_size, k_cache.stride(0),
        norm is not None and norm.dtype != dtype, eps, get_num_threads(),
    )  # fmt: skip
    return qkv[:, :heads]


def gated_activation(x: Tensor, activation: int) -> Tensor | None:
    """x [tokens, 2 * size] -> [tokens, size]."""
    if cpu.loaded is None:
        return None
    function = cpu.loaded.gated_activation.get(x.dtype)
    if function is None or not x.is_cpu or x.dim() != 2 or not x.is_contiguous():
        return None
    tokens, size = x.shape[0], x.shape[1] // 2
    y = x.new_empty((tokens, size))
    function(x.data_ptr(), y.data_ptr(), tokens, size, activation, get_num_threads())
    return y


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor | None:
    """As kernels/decode_attention.py's, q strided between sequences."""
    if cpu.loaded is None:
        return None
    dtype = q.dtype
    function = cpu.loaded.decode_attention.get(dtype)
    seqs, heads, head_dim = q.shape
    if (
        function is None
        or not q.is_cpu
        or q.stride(2) != 1
        or q.stride(1) != head_dim
        or heads * head_dim > _MAX_HEAD_FLOATS
        or not _is_block_major(k_cache, v_cache, dtype)
        or not (block_tables.is_contiguous() and context_lens.is_contiguous())
        or (sinks is not None and (sinks.dtype != dtype or not sinks.is_contiguous()))
    ):
        return None
    _, block_size, kv_heads, _ = k_cache.shape
    out = q.new_empty((seqs, heads, head_dim))
    function(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), block_tables.data_ptr(), context_lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(), out.data_ptr(), seqs, q.stride(0), block_tables.shape[1], heads, kv_heads, head_dim, block_size,
        k_cache.stride(0), window or 0, scale, get_num_threads(),
    )  # fmt: skip
    return out


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: VarlenBatch,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor | None:
    """As kernels/prefill_attention.py's, q strided between tokens."""
    if cpu.loaded is None:
        return None
    dtype = q.dtype
    function = cpu.loaded.prefill_attention.get(dtype)
    tokens, heads, head_dim = q.shape
    tables, starts, context_lens = batch.block_tables, batch.cu_seqlens_q, batch.context_lens
    if (
        function is None
        or not q.is_cpu
        or q.stride(2) != 1
        or q.stride(1) != head_dim
        or head_dim > _MAX_TILED_HEAD_DIM
        or not _is_block_major(k_cache, v_cache, dtype)
        or not (tables.is_contiguous() and starts.is_contiguous() and context_lens.is_contiguous())
        or (sinks is not None and (sinks.dtype != dtype or not sinks.is_contiguous()))
    ):
        return None
    _, block_size, kv_heads, _ = k_cache.shape
    out = q.new_empty((tokens, heads, head_dim))
    function(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), tables.data_ptr(), starts.data_ptr(), context_lens.data_ptr(),
        None if sinks is None else sinks.data_ptr(), out.data_ptr(), tables.shape[0], q.stride(0), tables.shape[1], heads, kv_heads, head_dim,
        block_size, k_cache.stride(0), window or 0, scale, get_num_threads(),
    )  # fmt: skip
    return out


def _is_block_major(k_cache: Tensor, v_cache: Tensor, dtype: torch.dtype) -> bool:
    """A block is contiguous, and both caches go from one to the next by the same stride."""
    _, _, kv_heads, head_dim = k_cache.shape
    strides = k_cache.stride()
    return k_cache.dtype == dtype and strides[1:] == (kv_heads * head_dim, head_dim, 1) and strides == v_cache.stride()
