"""Which form of an operation a CUDA device gets: Triton's where Triton can be imported, else torch's.

Decided once, when the operation's module is imported. `PILOTLIGHT_TRITON=0` leaves everything to torch.
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

SWITCH = "PILOTLIGHT_TRITON"


@cache
def _has_triton() -> bool:
    return os.environ.get(SWITCH) != "0" and torch.cuda.is_available() and find_spec("triton") is not None


def triton_form(name: str) -> Any:
    """The module of kernels/triton, or None: then torch computes."""
    return import_module(f"kernels.triton.{name}") if _has_triton() else None
