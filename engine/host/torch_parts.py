"""The parts of torch that an engine host on a CPU does not import, because it never uses them.

They take half of the time of torch's import: its trainers, compilers and exporters, and its formulas for the device `meta`, where a host on a CPU
only reserves places. Empty modules replace them; a name of such a module raises an error if it is called. This module is independent of what a host
computes.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

TRIED = "2.13."  # versions of torch with which this was tried; others are imported whole
PARTS = (
    "torch._functorch",
    "torch._higher_order_ops",
    "torch._meta_registrations",
    "torch._native",  # Triton's forms of a few operations
    "torch.ao",
    "torch.distributed._meta_registrations",
    "torch.distributions",
    "torch.export",
    "torch.hub",
    "torch.masked",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quantizable",
    "torch.nn.quantized",
    "torch.optim",
    "torch.profiler",
    "torch.quantization",
    "torch.testing",
    "torch.utils.data",
    "torchgen",
)


def leave_out() -> None:
    """Let this process import torch without PARTS. Does nothing if torch is imported already."""
    if "torch" in sys.modules or (torch := find_spec("torch")) is None or torch.origin is None:
        return
    if f"__version__ = '{TRIED}" in Path(torch.origin).with_name("version.py").read_text(encoding="utf-8"):
        sys.meta_path.insert(0, _Finder())


class _Finder(Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        is_part = name.startswith("torch") and any(name == part or name.startswith(f"{part}.") for part in PARTS)
        return ModuleSpec(name, self, is_package=True) if is_part else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Absent(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        absent = _AbsentName(name, (), {"__module__": self.__name__})
        setattr(self, name, absent)
        return absent


class _AbsentName(type):
    """A class, because torch derives classes from a part's names and checks types against them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{cls.__module__}.{cls.__name__} is left out of this process: remove its module from {__name__}.PARTS"
        )
