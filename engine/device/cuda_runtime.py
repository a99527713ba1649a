"""Functions of CUDA's runtime that torch lacks or makes slow, called in the library that torch uses.

This module knows addresses, and is independent of their contents.
"""

import ctypes
from typing import Any

import torch

_EITHER_WAY = 4  # cudaMemcpyDefault: the addresses determine the direction of a copy


class CudaRuntime:
    def __init__(self, device: torch.device) -> None:
        """Load the library. Raises OSError if it is missing."""
        self._device = device
        name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
        self._library: Any = ctypes.CDLL(name)  # CDLL releases the GIL, for slow calls
        copies: Any = ctypes.PyDLL(
            name
        )  # PyDLL keeps the GIL: if 1,000 copies released it, each might wait to get it back
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._library.cudaHostRegister.argtypes = [pointer, size, ctypes.c_uint]
        self._library.cudaHostUnregister.argtypes = [pointer]
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._begin_copy = copies.cudaMemcpyAsync
        self._begin_copy.argtypes = [pointer, pointer, size, ctypes.c_int, pointer]

    def register(self, address: int, num_bytes: int) -> str | None:
        """Pin host memory and map it for the device; return the reason if that fails."""
        with torch.cuda.device(self._device):
            return self._problem(self._library.cudaHostRegister(address, num_bytes, 0))

    def unregister(self, address: int) -> str | None:
        """Undo a registration; return the reason if that fails."""
        with torch.cuda.device(self._device):
            return self._problem(self._library.cudaHostUnregister(address))

    def begin_copy(self, into: int, source: int, num_bytes: int, stream: int) -> None:
        """Start a copy between device memory and pinned memory on a stream. Raises RuntimeError."""
        problem = self._problem(self._begin_copy(into, source, num_bytes, _EITHER_WAY, stream))
        if problem is not None:
            raise RuntimeError(f"a copy of {num_bytes} bytes between host and device failed: {problem}")

    def _problem(self, code: int) -> str | None:
        if code == 0:
            return None
        self._library.cudaGetLastError()  # clears the error: otherwise torch would raise it at this thread's next launch
        return bytes(self._library.cudaGetErrorString(code)).decode()
