"""torch's formulas of shapes for its meta device, which it imports at its start and an engine on a CPU never asks: a quarter of a second, of one.

`postpone` before torch is imported, `load` before operations run on the meta device. Where torch was imported by others it has them, and neither
does anything. Making empty tensors there, and views of them, needs no formulas.
"""

import importlib
import sys
from types import ModuleType

_NAME = "torch._meta_registrations"


class _Postponed(ModuleType):
    pass


def postpone() -> None:
    if "torch" not in sys.modules:
        sys.modules[_NAME] = _Postponed(_NAME)


def load() -> None:
    if isinstance(sys.modules.get(_NAME), _Postponed):
        del sys.modules[_NAME]
        importlib.import_module(_NAME)
