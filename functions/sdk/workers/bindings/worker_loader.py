"""Dynamic workers in functions: a function provides code, which runs as another function."""

import hashlib
import inspect
import json
from collections.abc import Callable
from typing import Any

from pilotlight.functions.channel.failure import Failure
from workers.bindings.service import fetched, remote_method
from workers.face import Face, Named, snake_case

_KNOWN = (
    "compatibility_date",
    "compatibility_flags",
    "main_module",
    "modules",
    "env",
    "global_outbound",
    "tails",
    "limits",
)


class WorkerLoader(Face):
    def get(self, id: str, callback: Callable[[], Any]) -> "LoadedWorker":
        """Return a worker by id; if it is not loaded, the callback provides its code at the first use."""
        return LoadedWorker(self, str(id), callback)

    def load(self, code: Any) -> "LoadedWorker":
        """Return a worker that runs this code."""
        digest = hashlib.sha256(json.dumps(_code(code), sort_keys=True, default=str).encode()).hexdigest()
        return LoadedWorker(self, digest, lambda: code)


class LoadedWorker(Named):
    def __init__(self, loader: WorkerLoader, id: str, code: Callable[[], Any]) -> None:
        self._loader = loader
        self._id = id
        self._code = code

    def get_entrypoint(self, name: str | None = None, options: Any = None) -> "LoadedEntrypoint":
        return LoadedEntrypoint(self, name or "default", dict((options or {}).get("props") or {}))

    async def _loaded(self) -> str:
        if not await self._loader._call("has", id=self._id):
            code = self._code()
            sent = _code(await code if inspect.isawaitable(code) else code)
            await self._loader._call("load", id=self._id, **sent)
        return self._id


class LoadedEntrypoint:
    """An entrypoint of a dynamic worker: has `fetch`; every other name is a method of its class."""

    __is_stub__ = True

    def __init__(self, worker: LoadedWorker, entrypoint: str, props: dict[str, Any]) -> None:
        self._worker = worker
        self._further = {"entrypoint": entrypoint, "props": props}

    async def fetch(self, resource: Any, options: Any = None, **named: Any) -> Any:
        loader, id = self._worker._loader, await self._worker._loaded()
        return await fetched(loader._channel, loader._name, {"id": id, **self._further}, resource, options, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            loader, id = self._worker._loader, await self._worker._loaded()
            return await remote_method(loader._channel, loader._name, name, {"id": id, **self._further})(
                *args, **kwargs
            )

        return call


def _code(given: Any) -> dict[str, Any]:
    """Check a worker's code, which has the platform's format; return it in the runtime's format."""
    code = {snake_case(name): value for name, value in dict(given).items()}
    if unknown := [name for name in code if name not in _KNOWN]:
        raise TypeError(f"a dynamic worker has no {unknown[0]!r}; it has {', '.join(_KNOWN)}")
    if "main_module" not in code or "modules" not in code:
        raise TypeError("a dynamic worker has a mainModule and modules")
    modules = {str(name): _module(str(name), source) for name, source in dict(code["modules"]).items()}
    has_network = not ("global_outbound" in code and code["global_outbound"] is None)
    if has_network and code.get("global_outbound") is not None:
        raise Failure(
            "globalOutbound must be None (no network) or left out; other workers are not supported", name="TypeError"
        )
    return {
        "main": str(code["main_module"]),
        "modules": modules,
        "env": dict(code.get("env") or {}),
        "network": has_network,
    }


def _module(name: str, source: Any) -> str:
    if isinstance(source, str):
        return source
    given = dict(source)
    for kind in ("py", "text"):
        if kind in given:
            return str(given[kind])
    if "json" in given:
        return json.dumps(given["json"])
    raise TypeError(f"the module {name!r} is {', '.join(given) or 'nothing'}; only Python, text and JSON are supported")
