"""The names of Gluon that the Hopper kernels use, with stand-ins for Triton's interpreter.

Gluon is Triton's language of layouts, buffers and waits. In the stand-ins layouts have no effect, a buffer is the block that it holds, and
asynchronous operations complete at once.

A kernel in Gluon must also import Triton's language (`import triton.language as tl`), and use its type for constants.
"""

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl
from triton.experimental.gluon import language

if triton.knobs.runtime.interpret:

    class _Buffers:
        """Stand-in for buffers in shared memory, or for one of them, indexed by rows or columns."""

        def __init__(self, blocks: list[Any], dtype: tl.dtype, at: int = 0, is_turned: bool = False) -> None:
            self._blocks, self.dtype, self._at, self._is_turned = blocks, dtype, at, is_turned

        def index(self, at: Any) -> "_Buffers":
            return _Buffers(self._blocks, self.dtype, int(at), self._is_turned)

        def permute(self, order: tuple[int, int]) -> "_Buffers":
            return _Buffers(self._blocks, self.dtype, self._at, not self._is_turned)

        def store(self, block: Any) -> None:
            self._blocks[self._at] = block

        def load(self) -> Any:
            return tl.trans(self._blocks[self._at]) if self._is_turned else self._blocks[self._at]

    def _allocated(dtype: tl.dtype, shape: list[int], layout: Any) -> _Buffers:
        blocks = [tl.full(shape[-2:], float("nan"), dtype) for _ in range(shape[0] if len(shape) == 3 else 1)]
        return _Buffers(blocks, dtype)

    def _multiplied(a: Any, b: _Buffers, sums: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        rows = a.load() if isinstance(a, _Buffers) else a
        return tl.dot(rows, b.load(), sums if use_acc else None, input_precision="ieee")

    def _waited(pending: int, deps: tuple[Any, ...]) -> Any:
        return deps[0] if len(deps) == 1 else deps

    def _nothing(*_: int) -> None:
        pass

    gl: Any = SimpleNamespace(
        BlockedLayout=language.BlockedLayout,
        DotOperandLayout=language.DotOperandLayout,
        NVMMADistributedLayout=language.NVMMADistributedLayout,
        NVMMASharedLayout=language.NVMMASharedLayout,
        SliceLayout=language.SliceLayout,
        allocate_shared_memory=_allocated,
        arange=lambda first, end, layout: tl.arange(first, end),
        convert_layout=lambda block, layout: block,
        full=lambda shape, value, dtype, layout: tl.full(shape, value, dtype),
        num_warps=lambda: 8,
    )
    async_copy: Any = SimpleNamespace(
        async_copy_global_to_shared=lambda buffer, pointers: buffer.store(tl.load(pointers)),
        commit_group=_nothing,
        wait_group=_nothing,
    )
    warpgroup_mma: Any = _multiplied
    warpgroup_mma_wait: Any = _waited
    fence_async_shared: Any = _nothing
else:
    from triton.experimental.gluon.language.nvidia import hopper

    gl = language
    async_copy = hopper.async_copy
    warpgroup_mma = hopper.warpgroup_mma
    warpgroup_mma_wait = hopper.warpgroup_mma_wait
    fence_async_shared = hopper.fence_async_shared
