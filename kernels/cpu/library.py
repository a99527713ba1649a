"""The C library as loaded into this process, or the fact that there is none.

Knows when it may be used; refuses to know tensors' shapes. Until `start` has found or built it, and for ever where it cannot be built, every
operation is torch's: slower, with the same results up to rounding.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.build import BuildError, build_library, find_library

log = logging.getLogger(__name__)

SWITCH = "PILOTLIGHT_CPU_KERNELS"  # 0: torch computes everything
# Arguments by letter: p a pointer, l a long, i an int, f a float.
_SIGNATURES = {
    "linear": "pppplllliii",
    "gemm": "pppplllliii",
    "rows_of": "ppplllfi",
    "rms_norm": "pppppllifi",
    "rotate_and_cache": "pppppppllllllifi",
    "gated_activation": "ppllii",
    "decode_attention": "ppppppplllllllllfi",
    "prefill_attention": "pppppppplllllllllfi",
    "are_finite": "pl",
}
_TYPES: dict[str, Any] = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
_ENDINGS = {torch.float32: "f32", torch.bfloat16: "bf16"}

Function = Callable[..., Any]


class Library:
    """One function per operation and type."""

    def __init__(self, path: Path) -> None:
        opened = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        self.linear = _functions(opened, "linear")
        gemm = _functions(opened, "gemm")
        self.gemm = {dtype: gemm[dtype] for dtype in gemm if _number(opened, f"gemm_is_fast_{_ENDINGS[dtype]}")}
        self.rows_of = _functions(opened, "rows_of")
        self.rms_norm = _functions(opened, "rms_norm")
        self.rotate_and_cache = _functions(opened, "rotate_and_cache")
        self.gated_activation = _functions(opened, "gated_activation")
        self.decode_attention = _functions(opened, "decode_attention")
        self.prefill_attention = _functions(opened, "prefill_attention")
        self.sampling_sums = _function(opened.sampling_sums, "pppppllli")
        self.highest = _function(opened.highest, "pppllli")
        self.philox_uniform = _function(opened.philox_uniform, "ppppl")
        self.workspace_new = _function(opened.workspace_new, "", _TYPES["p"])
        self.workspace_free = _function(opened.workspace_free, "p")
        self.program_begin = _function(opened.program_begin, "pi", _TYPES["p"])
        self.program_end = _function(opened.program_end, "p", _TYPES["l"])
        self.program_run = _function(opened.program_run, "p")
        self.program_free = _function(opened.program_free, "p")
        self.are_finite = _functions(opened, "are_finite", ctypes.c_int)
        self.sum_words = opened.sum_words  # (pointer, count of 32-bit words, threads): how fast memory can be read
        self.sum_words.argtypes, self.sum_words.restype = [_TYPES["p"], _TYPES["l"], _TYPES["i"]], ctypes.c_longlong


loaded: Library | None = None  # read at every call: it may appear while a model is already serving
_starting = threading.Lock()
_started = False


def start(*, wait: bool = False) -> None:
    """Use the library that is there, or build it in the background; with `wait`, before returning. The first call counts."""
    global _started
    with _starting:
        if _started or os.environ.get(SWITCH) == "0":
            return
        _started = True
        if _use_existing():
            return
        if wait:
            _use_built(in_background=False)
        else:
            threading.Thread(target=_use_built, args=(True,), name="cpu-kernels", daemon=True).start()


def _use_existing() -> bool:
    global loaded
    try:
        path = find_library()
    except BuildError:
        return False  # building will fail too, and say so
    if path is None:
        return False
    try:
        loaded = Library(path)
    except (OSError, AttributeError) as error:
        log.warning("the CPU kernels in %s are damaged (%s) and are built again", path, error)
        path.unlink(missing_ok=True)
    return loaded is not None


def _use_built(in_background: bool) -> None:
    global loaded
    try:
        loaded = Library(build_library(in_background=in_background))
    except (BuildError, OSError, AttributeError) as error:
        log.warning("the CPU kernels cannot be used, torch computes instead, more slowly: %s", error)


def _functions(opened: ctypes.CDLL, name: str, result: Any = None) -> dict[torch.dtype, Function]:
    functions: dict[torch.dtype, Function] = {}
    for dtype, ending in _ENDINGS.items():
        functions[dtype] = _function(getattr(opened, f"{name}_{ending}"), _SIGNATURES[name], result)
    return functions


def _function(function: Any, signature: str, result: Any = None) -> Function:
    function.restype = result
    function.argtypes = [_TYPES[letter] for letter in signature]
    return function


def _number(opened: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(opened, name).value
