"""Recording of a computation by the C library's operations as a program that can be replayed.

A replay reads the present contents of the inputs. The recorder knows where every byte of the computation is: results are placed in a workspace that
does not move, and views are resolved to addresses. Any other operation of torch would be missing from the program, so it ends the recording. This
module is independent of models or batches.
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
    """A computation that the C library cannot do alone; the message names the operation."""


class ProgramRecorder:
    """A recorder whose programs share memory, so they never run at the same time."""

    def __init__(self, dtype: torch.dtype, is_all_ours: bool = False) -> None:
        """Prepare a recorder.

        `dtype`: the type of the products. `is_all_ours`: the library computes all products, whatever their number of rows.
        """
        self._dtype = dtype
        self._is_all_ours = is_all_ours
        self.workspace: Workspace | None = None

    def takes(self, rows: int) -> bool:
        return self._is_all_ours or cpu.has_products(rows, self._dtype)

    def record(self, forward: Forward) -> "Program":
        """Run `forward` and return its program.

        Raises NotRecordableError; the operations before the failing one have been computed.
        """
        if cpu.loaded is None:
            raise NotRecordableError("the C library is not loaded")
        if self.workspace is None or self.workspace.library is not cpu.loaded:
            self.workspace = Workspace(cpu.loaded)
        return Program(self.workspace, forward)


class Program:
    """A recorded computation.

    `output`: the results, overwritten by the next run of any program of the recorder.
    """

    def __init__(self, workspace: "Workspace", forward: Forward) -> None:
        library = workspace.library
        self._workspace = workspace
        self._forward = forward  # keeps alive the tensors that every replay reads and writes
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
            raise NotRecordableError("there is no memory for all steps of the program")
        self.output = tuple(workspace.lasting(result) for result in results)

    def replay(self) -> None:
        self._workspace.library.programs.program_run(self._program)


class Workspace:
    """Memory for the tensors of a recording, reused as by an allocator. It lives as long as its programs."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.scratch = library.programs.workspace_new()
        if not self.scratch:
            raise NotRecordableError("there is no memory for programs")
        weakref.finalize(self, library.programs.workspace_free, self.scratch).atexit = False
        self._chunks: list[Tensor] = []
        self._taken: dict[int, int] = {}  # sizes of the allocated pieces of the chunks, by address

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if not num_bytes:
            return torch.empty(*shape, dtype=dtype)
        address = self._find(-(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        memory = (ctypes.c_char * num_bytes).from_address(address)
        weakref.finalize(memory, self._taken.pop, address).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(*shape)

    def lasting(self, tensor: Tensor) -> Tensor:
        """Return a view of a chunk with the tensor's values, which outlives the tensor.

        The memory may be allocated again meanwhile. Raises NotRecordableError if no chunk contains it contiguously.
        """
        address = tensor.data_ptr()
        for chunk in self._chunks:
            start = address - chunk.data_ptr()
            if 0 <= start < chunk.nbytes and tensor.is_contiguous():
                return chunk[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        raise NotRecordableError("one of its results was not made by the C library")

    @property
    def sizes(self) -> list[int]:
        """Return the bytes of each chunk, in order."""
        return [chunk.nbytes for chunk in self._chunks]

    def place(self, address: int) -> tuple[int, int] | None:
        """Return the number of the chunk that contains an address, and the offset in it.

        None if no chunk does.
        """
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
    """Handler of every torch operation: allocates memory, accepts views, and refuses other operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler, which is not needed and takes 2 s in the middle of a step."""
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
        raise NotRecordableError(f"part of it is computed by torch ({func})")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
