"""Parts of torch that are imported when something of them is asked for: torch imports all of itself at its start, an engine asks for a quarter of it.

Each is replaced by a module without content. The first question to any of them, once torch is there, makes all of them real, in the order in which
torch wanted them and under the same identity. Knows which parts these are, for the versions of torch that were looked at; any other is imported as
it is. Refuses to know what they are for.
"""

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NamedTuple

_VERSIONS = ("2.13.",)
# Formulas of shapes for the meta device: nothing of them is ever asked for by name, hence `load_meta_formulas`.
_META_FORMULAS = "torch._meta_registrations"
# What nobody but torch asks for at its start: a parser of its operations' declarations, and a tool of tests, with asyncio behind it.
_OF_OTHERS = frozenset({"torchgen.model", "unittest.mock"})
_PARTS = frozenset(
    {
        *("torch._higher_order_ops", "torch._lobpcg", _META_FORMULAS, "torch.ao", "torch.compiler"),
        *("torch.distributed._meta_registrations", "torch.distributions", "torch.export", "torch.func", "torch.fx"),
        *("torch.fx.operator_schemas", "torch.fx.traceback"),
        *(
            "torch.hub",
            "torch.jit",
            "torch.masked",
            "torch.nested",
            "torch.nn",
            "torch.nn.intrinsic",
            "torch.nn.modules",
        ),
        *(
            "torch.nn.qat",
            "torch.nn.quantizable",
            "torch.nn.quantized",
            "torch.optim",
            "torch.package",
            "torch.profiler",
        ),
        *("torch.quantization", "torch.quasirandom", "torch.signal", "torch.testing", "torch.utils.data"),
        *_OF_OTHERS,
    }
)
# It puts other kernels under operations of GPUs. A torch that was built without any only looks for them.
_OF_GPUS = frozenset({"torch._native", "torch.xpu"})
# What torch itself takes from them at its start, without calling it.
_FUNCTIONS = {
    "torch._higher_order_ops": ("cond", "while_loop"),
    "torch._lobpcg": ("lobpcg",),
    "torch.func": ("vmap",),
}
# And what it asks only to have something: the signatures to forget when a library of operations goes, of which there are none so far.
_EMPTY = frozenset({("torch.fx.operator_schemas", "_SCHEMA_TO_SIGNATURE_CACHE")})
_ELSEWHERE = {("torch.jit", "Future"): "torch.futures"}


def postpone() -> None:
    """Before torch is imported; where others have imported it, it has these parts, and nothing is done."""
    if "torch" in sys.modules:
        return
    version, has_gpus = build()
    if version.startswith(_VERSIONS):
        sys.meta_path.insert(0, _Finder(_PARTS if has_gpus else _PARTS | _OF_GPUS))


def load_meta_formulas() -> None:
    """Before operations run on the meta device. Making empty tensors there, and views of them, needs no formulas."""
    if isinstance(sys.modules.get(_META_FORMULAS), _Postponed):
        _load_all()


class _Postponed(ModuleType):
    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if _loading.get(module) == threading.get_ident():
            raise AttributeError(f"module {module!r} is being imported and has no attribute {name!r} so far")
        if _torch_is_starting():
            if name in _FUNCTIONS.get(module, ()):
                return _given.setdefault((module, name), partial(_call, module, name))
            if (module, name) in _EMPTY:
                return {}
            if (module, name) in _ELSEWHERE:
                return getattr(importlib.import_module(_ELSEWHERE[module, name]), name)
            if hasattr(self, "__path__") and PathFinder.find_spec(f"{module}.{name}", self.__path__) is not None:
                return importlib.import_module(f"{module}.{name}")
            _load(self)
        else:
            if module not in _OF_OTHERS:
                _load_all()
            _load(self)  # `_load_all` may be under way in this thread, with others first
        return getattr(self, name)


class _Finder:
    def __init__(self, parts: frozenset[str]) -> None:
        self._parts = parts

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("torch.") and name not in _OF_OTHERS:
            return None
        if name not in _waiting and not _torch_is_starting():
            if name in _OF_OTHERS:  # asked for before torch, or by torch's later self
                return None
            _load_all()  # what is imported now may rely on the order in which torch is imported
            if (there := sys.modules.get(name)) is not None:
                there.__spec__ = ModuleSpec(name, _There(there))  # whose spec the import system then takes, not ours
                return there.__spec__
            return None
        if name not in self._parts:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _Loader(spec.loader, _waiting.get(name))
        return spec


class _Loader(Loader):
    """Of a part twice: first of the module without content, and then, once it waits to be one, of the real module in its place."""

    def __init__(self, real: Any, waiting: _Postponed | None) -> None:
        self._real = real
        self._waiting = waiting

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if self._waiting is None:
            _order.append(spec.name)
        return self._waiting or _Postponed(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if self._waiting is None:
            return
        name = module.__name__
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._real
        _loading[name] = threading.get_ident()
        try:
            self._real.exec_module(module)
        finally:
            del _loading[name]
        module.__class__ = ModuleType
        _waiting.pop(name, None)


class _There(Loader):
    """Of a module that has been imported while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_given: dict[tuple[str, str], Any] = {}  # functions of theirs that torch has taken
_order: list[str] = []  # in which torch wanted them
_waiting: dict[str, _Postponed] = {}
_loading: dict[str, int] = {}  # by which thread
_loading_all: set[int] = set()  # which threads
_lock = threading.Lock()


def _load_all() -> None:
    me = threading.get_ident()
    if me in _loading_all:
        return
    _loading_all.add(me)
    try:
        for name in _order:
            module = sys.modules.get(name)
            if isinstance(module, _Postponed):
                _load(module)
        torch = sys.modules["torch"]
        for (part, name), given in _given.items():
            if getattr(torch, name) is given:
                setattr(torch, name, getattr(sys.modules[part], name))
    finally:
        _loading_all.discard(me)


def _load(module: _Postponed) -> None:
    """Through the import system, whose locks know about threads that import each other's modules."""
    name = module.__name__
    if _loading.get(name) == threading.get_ident():
        return
    with _lock:
        if isinstance(module, _Postponed) and name not in _waiting:
            _waiting[name] = module
            sys.modules.pop(name, None)
    try:
        importlib.import_module(name)
    except BaseException:
        with _lock:
            _waiting.pop(name, None)
            sys.modules.setdefault(name, module)
        raise


def _call(module: str, name: str, *arguments: Any, **more: Any) -> Any:
    function: Callable[..., Any] = getattr(sys.modules[module], name)
    return function(*arguments, **more)


def _torch_is_starting() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


class Build(NamedTuple):
    """What there is to import."""

    version: str  # empty: there is no torch
    has_gpus: bool  # it knows a kind of them


@cache
def build() -> Build:
    """Without importing it."""
    spec = PathFinder.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        values: dict[str, Any] = {}
        try:
            with open(f"{folder}/version.py", encoding="utf-8") as file:
                exec(file.read(), values)
        except OSError:
            continue
        kinds = ("cuda", "hip", "rocm", "xpu")
        return Build(str(values.get("__version__", "")), any(values.get(kind) for kind in kinds))
    return Build("", has_gpus=False)
