"""The C library's functions for ctypes, by their C names.

This module knows the arguments of each function, and does not import torch, so that processes without torch can call them, too.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

Opened = ctypes.CDLL
Function = Callable[..., Any]

# C types by function: a letter for each argument and, after a colon, one for the result if any (p pointer, l long, q 64-bit integer, i int, f float).
_OF_BOTH_TYPES = {
    "linear": "pppplllliii:i",
    "gemm": "pppplllliii:i",
    "lossless_linear": "ppppppplllliii:i",
    "lossless_gemm": "ppppppplllliii:i",
    "lossless_rows": "pppppplllfi",
    "coded_linear": "ppppppllllliiii:i",
    "block_linear": "ppppppllllllliii:i",
    "block_rows": "pppppllllllfi",
    "rows_of": "ppplllfi",
    "rms_norm": "pppppllifi",
    "rotate_and_cache": "pppppppplllllllllifpi",
    "gated_activation": "ppllii",
    "apply_gate": "ppplllllllii",
    "decode_attention": "ppppppplllllllllllfpi",
    "verify_attention": "pppppppplllllllllllfpi",
    "prefill_attention": "pppppppplllllllllllfppi",
    "latent_attention": "ppppppplllllllllfi",
    "add_lora": "pppppllllllllllli:i",
    "is_finite": "pl:i",
    "short_conv": "ppppppppplllllii",
    "gated_delta_rule": "ppppppppppplllllllllli",
    "ssd": "ppppppppppplllllllli",
    "gated_norm": "pppplllllfii",
}
_SIGNATURES = {
    "sampling_sums": "pppppllli",
    "argmax": "pppllli",
    "mask_logits": "pppllli",
    "philox_uniform": "ppppl",
    "workspace_new": ":p",
    "workspace_free": "p",
    "program_begin": "pi:p",
    "program_end": "p:l",
    "program_run": "p",
    "program_free": "p",
    "lossless_survey": "ppplli",
    "lossless_encode": "ppppplli",
    "join_planes": "ppl",
    "sum_words": "pli:q",  # (pointer, count of 32-bit words, threads)
} | {f"{name}_{ending}": signature for name, signature in _OF_BOTH_TYPES.items() for ending in ("f32", "bf16")}
_TYPES: dict[str, Any] = {
    "p": ctypes.c_void_p,
    "l": ctypes.c_long,
    "q": ctypes.c_longlong,
    "i": ctypes.c_int,
    "f": ctypes.c_float,
}


def open_library(path: Path) -> Opened:
    """Load the library. Raises OSError."""
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW)


def find(opened: Opened, name: str) -> Function:
    """Return a function with its types.

    Raises AttributeError if the library lacks it, KeyError if its arguments are not listed here.
    """
    arguments, _, result = _SIGNATURES[name].partition(":")
    function = getattr(opened, name)
    function.argtypes = [_TYPES[letter] for letter in arguments]
    function.restype = _TYPES[result] if result else None
    return function


def number(opened: Opened, name: str) -> int:
    return ctypes.c_int.in_dll(opened, name).value
