"""Records a computation out of the C library's operations as one program, which computes it again from what its inputs hold then.

Knows where every byte of the computation lies: results are given memory of a workspace, which stays where it is, and views are looked through.
Whatever else torch is asked to do meanwhile would be missing from the program, so it ends the recording. Refuses to know models and batches.
"""

import ctypes
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pilotlight.kernels.cpu import library as cpu
from pilotlight.kernels.cpu import pages
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.cpu.mapped_file import HUGE_PAGE

_ALIGNMENT = 128
_aten: Any = torch.ops.aten

Forward = Callable[[], tuple[Tensor, ...]]


class NotRecordableError(RuntimeError):
    """The sentence says what a computation asks for that is not the C library's."""


class ProgramRecorder:
    """Records programs that share their memory, and so never run at the same time."""

    def __init__(self, dtype: torch.dtype, is_all_ours: bool = False) -> None:
        """`dtype`: of the products. `is_all_ours`: none of them is torch's, however many rows it has."""
        self._dtype = dtype
        self._is_all_ours = is_all_ours
        self._workspace: Workspace | None = None

    def takes(self, rows: int) -> bool:
        return self._is_all_ours or cpu.has_products(rows, self._dtype)

    def record(self, forward: Forward) -> "Program":
        """Compute `forward` and return its program. Raises NotRecordableError; what has been computed until then is not undone."""
        if cpu.loaded is None:
            raise NotRecordableError("the C library is not there")
        if self._workspace is None or self._workspace.library is not cpu.loaded:
            self._workspace = Workspace(cpu.loaded)
        return Program(self._workspace, forward)


class Program:
    """`output`: the results, overwritten when another program of the same recorder runs."""

    def __init__(self, workspace: "Workspace", forward: Forward) -> None:
        library = workspace.library
        self._workspace = workspace
        self._forward = forward  # what it refers to is read and written at every replay, and so has to stay
        self._program = library.programs.program_begin(workspace.scratch, torch.get_num_threads())
        if not self._program:
            raise NotRecordableError("there is no memory for a program")
        weakref.finalize(self, library.programs.program_free, self._program).atexit = False
        try:
            with Watch(workspace):
                results = forward()
        finally:
            self.num_steps = library.programs.program_end(self._program)
        if self.num_steps < 0:
            raise NotRecordableError("there is no memory for a program of its length")
        self.output = tuple(workspace.lasting(result) for result in results)

    def replay(self) -> None:
        self._workspace.library.programs.program_run(self._program)


class Workspace:
    """Memory that tensors are given while a program is recorded, and that others are given when those are gone: as an allocator's, but that it stays
    here for whoever reads it by its address."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.scratch = library.programs.workspace_new()
        if not self.scratch:
            raise NotRecordableError("there is no memory for programs")
        weakref.finalize(self, library.programs.workspace_free, self.scratch).atexit = False
        self._chunks: list[Tensor] = []
        self._taken: dict[int, int] = {}  # by their addresses, the sizes of what lies in the chunks

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            raise NotRecordableError(f"a tensor of shape {list(shape)} holds nothing")
        address = self._find(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        memory = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(memory, self._taken.pop, address).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(*shape)

    def lasting(self, tensor: Tensor) -> Tensor:
        """Return the same values as a view of a chunk, which outlives the tensor; its memory may be allocated again."""
        address = tensor.data_ptr()
        for chunk in self._chunks:
            start = address - chunk.data_ptr()
            if 0 <= start < chunk.nbytes and tensor.is_contiguous():
                return chunk[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        raise NotRecordableError("a result of it is none of the C library's")

    @property
    def sizes(self) -> list[int]:
        """The bytes of each chunk, in order."""
        return [chunk.nbytes for chunk in self._chunks]

    def place(self, address: int) -> tuple[int, int] | None:
        """Return the number of the chunk that an address lies in, and the offset in it; None: in no chunk."""
        for i, chunk in enumerate(self._chunks):
            if 0 <= address - chunk.data_ptr() < chunk.nbytes:
                return i, address - chunk.data_ptr()
        return None

    def _find(self, size: int) -> int:
        taken = sorted(self._taken.items())
        for chunk in self._chunks:
            start = chunk.data_ptr()
            end = start + chunk.nbytes
            for address, occupied in taken:
                if start <= address < end:
                    if address - start >= size:
                        break
                    start = address + occupied
            if end - start >= size:
                self._taken[start] = size
                return start
        self._chunks.append(pages.empty((max(size, HUGE_PAGE),), torch.uint8))
        return self._find(size)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Handles every operation that torch is asked for: allocates, lets views pass, refuses the rest."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, which takes 2 s in the middle of a step and has nothing to compile."""
        return False

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.new_empty.default:
            return self._workspace.empty(args[1], kwargs.get("dtype") or args[0].dtype)
        if func is _aten.empty_like.default:
            return self._workspace.empty(args[0].shape, args[0].dtype)
        if func.is_view and func is not _aten.lift_fresh.default:
            seen = func(*args, **kwargs)
            if not isinstance(seen, Tensor) or _memory(seen) == _memory(args[0]):
                return seen
        raise NotRecordableError(f"torch computes a part of it ({func})")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
