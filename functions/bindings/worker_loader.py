"""Dynamic workers: a function provides code, which is served as another function.

It is confined like any other function. It is served until its loader ends or loads too many others (`BindingLimits`). Its bindings are
plain values. It has network access unless the loader denies it.
"""

import asyncio
import itertools
import os
import shutil
from collections import OrderedDict
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from pilotlight.functions.bindings.assets.asset_files import FetchCall
from pilotlight.functions.bindings.binding import Binding, BindingError, Body, Functions, Services, method
from pilotlight.functions.bindings.place import directory_of, name_of
from pilotlight.functions.bindings.service_binding import RpcCall, called, fetched
from pilotlight.functions.manifest import BindingDeclaration, Manifest, ManifestError
from pilotlight.support import atomic_files

MAX_MODULES = 200
MAX_CODE_BYTES = 4 << 20
_numbers = itertools.count(1)  # make the names of folders and pools unique


class HasWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str


class LoadWorker(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    main: str
    modules: dict[str, str]
    env: dict[str, Any] = {}
    network: bool = True


class FetchWorker(FetchCall, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    entrypoint: str = "default"
    props: dict[str, Any] = msgspec.field(default_factory=dict)


class RpcWorker(RpcCall, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    entrypoint: str = "default"
    props: dict[str, Any] = msgspec.field(default_factory=dict)


class WorkerLoader(Binding):
    kind = "worker_loader"

    def __init__(self, functions: Functions, function: str, directory: Path, max_loaded: int) -> None:
        self._max_loaded = max_loaded
        self._functions = functions
        self._function = function
        self._directory = directory
        self._loaded: OrderedDict[str, str] = OrderedDict()  # pool of each loaded worker, by the function's id for it
        self._folders: dict[
            str, Path
        ] = {}  # folder of each pool; removed pools are included, because their requests may still be open
        self._loading = asyncio.Lock()
        self._is_clean = False

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "WorkerLoader":
        if services.functions is None:
            raise BindingError(f"{declaration.name}: this site cannot run dynamic workers")
        directory = directory_of(state_dir, "worker_loader", f"{services.function}/{declaration.name}")
        return cls(
            services.functions,
            services.function,
            directory / f"{os.getpid()}.{next(_numbers)}",
            services.limits.dynamic_workers,
        )

    @method
    async def has(self, request: HasWorker) -> bool:
        return request.id in self._loaded

    @method
    async def load(self, request: LoadWorker) -> None:
        async with self._loading:
            if request.id not in self._loaded:
                await self._load(request)

    async def _load(self, request: LoadWorker) -> None:
        while len(self._loaded) >= self._max_loaded:
            self._remove(next(iter(self._loaded)))
        await self._remove_folders()
        name, number = f"{self._function}+{name_of(request.id)}", next(_numbers)
        pool = f"{name}.{self._directory.name}.{number}"
        folder = self._folders[pool] = self._directory / str(number)
        main = await asyncio.to_thread(self._write, folder, request)
        env = tuple(BindingDeclaration("var", name, {"value": value}) for name, value in request.env.items())
        manifest = Manifest(name, folder, main, env, has_egress=request.network)
        try:
            self._functions.add(manifest, name=pool)
        except ManifestError as error:
            raise BindingError(f"the dynamic worker {request.id!r} cannot be loaded: {error}") from None
        self._loaded[request.id] = pool

    @method
    async def fetch(self, request: FetchWorker, body: Body | None) -> Any:
        options = {"props": request.props} if request.props else {}
        return await fetched(self._functions, self._pool(request.id), request.entrypoint, request, body, options)

    @method
    async def rpc(self, request: RpcWorker, body: Body | None) -> Any:
        options = {"props": request.props} if request.props else {}
        return await called(self._functions, self._pool(request.id), request.entrypoint, request, body, options)

    async def close(self) -> None:
        for id in tuple(self._loaded):
            self._remove(id)
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    def _pool(self, id: str) -> str:
        if id not in self._loaded:
            raise BindingError(
                f"the dynamic worker {id!r} is no longer loaded; load it again", code="not_loaded", status=503
            )
        self._loaded.move_to_end(id)
        return self._loaded[id]

    def _write(self, folder: Path, request: LoadWorker) -> Path:
        """Write the modules to the folder; return the path of the main one. Raises BindingError."""
        if len(request.modules) > MAX_MODULES or sum(map(len, request.modules.values())) > MAX_CODE_BYTES:
            sentence = f"a dynamic worker has at most {MAX_MODULES} modules and {MAX_CODE_BYTES >> 20} MiB of them"
            raise BindingError(sentence, status=413)
        if request.main not in request.modules or not request.main.endswith(".py"):
            raise BindingError(f"mainModule names {request.main!r}; it must be one of the modules, and a Python file")
        self._clean()
        shutil.rmtree(folder, ignore_errors=True)  # an earlier process may have had this one's id, as in a container
        for name, source in request.modules.items():
            place = PurePosixPath(name)
            if place.is_absolute() or ".." in place.parts or not place.parts or "\0" in name:
                raise BindingError(f"the module's name {name!r} is outside the worker's folder")
            path = folder / place
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(source, encoding="utf-8")
            except (OSError, UnicodeEncodeError) as error:
                raise BindingError(f"the module {name!r} cannot be written: {error}") from None
        atomic_files.let_others_read(folder)
        return folder / request.main

    def _clean(self) -> None:
        """Remove the folders that earlier processes left."""
        if not self._is_clean:
            self._is_clean = True
            for left in self._directory.parent.iterdir() if self._directory.parent.is_dir() else ():
                if not left.name.startswith(f"{os.getpid()}."):
                    shutil.rmtree(left, ignore_errors=True)

    async def _remove_folders(self) -> None:
        """Remove the oldest folders of removed workers.
        The newest are kept, because open requests may still import from them."""
        removed = [pool for pool in self._folders if pool not in self._loaded.values()]
        for pool in removed[: max(0, len(removed) - self._max_loaded)]:
            await asyncio.to_thread(shutil.rmtree, self._folders.pop(pool), ignore_errors=True)

    def _remove(self, id: str) -> None:
        self._functions.remove(self._loaded.pop(id))
