"""Calls of CUDA's runtime that torch does not offer, or at a multiple of their price, in the library that torch has loaded.

Knows addresses; refuses to know what lies there.
"""

import ctypes
from typing import Any

import torch

_READ_ONLY = 8  # cudaHostRegisterReadOnly, without which the driver refuses what this process may not write


class CudaRuntime:
    def __init__(self, device: torch.device) -> None:
        """Raises OSError where there is no such library."""
        self._device = device
        self._library: Any = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}")
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._library.cudaHostRegister.argtypes = [pointer, size, ctypes.c_uint]
        self._library.cudaHostUnregister.argtypes = [pointer]
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def register(self, address: int, num_bytes: int, is_read_only: bool) -> str | None:
        """Pin memory of the host and map it for the device; return why that cannot be."""
        with torch.cuda.device(self._device):
            return self._problem(self._library.cudaHostRegister(address, num_bytes, _READ_ONLY if is_read_only else 0))

    def unregister(self, address: int) -> str | None:
        """Undo a registration; return why that cannot be."""
        with torch.cuda.device(self._device):
            return self._problem(self._library.cudaHostUnregister(address))

    def _problem(self, code: int) -> str | None:
        if code == 0:
            return None
        self._library.cudaGetLastError()  # else this thread's next launch by torch would raise it
        return bytes(self._library.cudaGetErrorString(code)).decode()
