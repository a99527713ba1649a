"""Which form of an operation a CUDA device gets: Triton's where Triton can be imported, else torch's.

Decided once, when the operation's module is imported. `PILOTLIGHT_TRITON=0` leaves everything to torch; `1` has Triton's form ready on a machine
without CUDA too, for what pretends to be there (kernels/rehearsal.py).
"""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

SWITCH = "PILOTLIGHT_TRITON"


@cache
def takes_triton() -> bool:
    """Whether a CUDA device gets Triton's forms."""
    wanted = os.environ.get(SWITCH)
    return wanted != "0" and (wanted == "1" or torch.cuda.is_available()) and find_spec("triton") is not None


def triton_form(name: str) -> Any:
    """The module of kernels/triton, or None: then torch computes."""
    return import_module(f"kernels.triton.{name}") if takes_triton() else None
