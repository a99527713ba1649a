"""Workers AI's fine-tunes. Accounts list, create, upload and remove adapters; routers read all.

The account is that of the key, or of the router's header; the account in the path is ignored. Requests use an adapter by its id or name (`lora`), or
as MODEL:NAME.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.dialects.workers_ai_api import parse_finetune
from pilotlight.engine.adapters.peft import CONFIG, WEIGHTS
from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.planning.model_plan import read_model
from pilotlight.runtime.api.connection import json_response
from pilotlight.runtime.api.middleware import ACCOUNT
from pilotlight.runtime.api.router_context import check_model, require_router, tenant_in
from pilotlight.runtime.api.routes.endpoint import PREFIXES
from pilotlight.runtime.models.adapters import AdapterRegistry, is_name
from pilotlight.runtime.models.finetunes import FinetuneStore, Shapes, as_api_errors
from pilotlight.runtime.models.model_state import no_model
from pilotlight.runtime.models.model_view import ModelRegistry
from pilotlight.runtime.models.sources import SourceError, directory_of, local_directory
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.errors import ApiError
from pilotlight.wire.fine_tuning import jobs_answer
from pilotlight.wire.hop.finetunes import INTERNAL_PATH, packed, unpacked
from pilotlight.wire.http.asgi import query_number, read_body
from pilotlight.wire.workers_ai import Envelope, FinetuneAsset, ResultInfo

AT = "/client/v4/accounts/{account_id}/ai/finetunes"
_JOB_PATHS = ("", "/{job}", "/{job}/{part}")
MOST_LISTED = 1000
LISTED = 50  # default number of adapters in a list
BODY_BYTES = 64 << 10  # limit of a JSON body
FORM_BYTES = 16 << 10  # limit of a form's size without its file
CONFIG_BYTES = 1 << 20
MOST_UPLOADS = 8  # limit of uploads at the same time: each holds its received files on the disk
UPLOAD_S = 600.0  # time limit of one upload; a file of the default maximum size needs 500 kB/s
REREAD_S = 30.0  # Retry-After if the model must be loaded first

_encoder = msgspec.json.Encoder()


class FinetuneRoutes:
    def __init__(self, models: ModelRegistry, adapters: AdapterRegistry) -> None:
        self._models = models
        self._adapters = adapters
        self._num_uploads = 0

    def routes(self) -> list[Route]:
        return [
            Route(f"{AT}/public", self.public),
            Route(AT, self.all, methods=["GET"]),
            Route(AT, self.create, methods=["POST"]),
            Route(f"{AT}/{{id}}", self.remove, methods=["DELETE"]),
            Route(f"{AT}/{{id}}/finetune-assets", self.upload, methods=["POST"]),
            *(
                Route(f"{prefix}/fine_tuning/jobs{rest}", self.jobs, methods=["GET", "POST"])
                for prefix in PREFIXES
                for rest in _JOB_PATHS
            ),
            Route(INTERNAL_PATH, self.every, methods=["GET"]),
            Route(f"{INTERNAL_PATH}/{{id}}", self.one, methods=["GET", "PUT", "DELETE"]),
        ]

    async def all(self, request: Request) -> Response:
        store = self._adapters.finetunes
        found = [] if store is None else store.of(tenant_in(request.scope).owner)
        return _enveloped([finetune.listed() for finetune in found])

    async def jobs(self, request: Request) -> Response:
        """Return the account's adapters as OpenAI's fine-tuning jobs."""
        store, named = self._adapters.finetunes, request.path_params
        owned = [] if store is None else store.of(tenant_in(request.scope).owner)
        return json_response(_encoder.encode(jobs_answer(request.method, named.get("job"), named.get("part"), owned)))

    async def public(self, request: Request) -> Response:
        """Return the adapters that every account may use, ordered by model and name."""
        limit, offset = (
            query_number(request.query_params, name, default) for name, default in (("limit", LISTED), ("offset", 0))
        )
        found = await asyncio.to_thread(self._adapters.public)
        shown = [each.listed() for each in found[offset : offset + min(limit, MOST_LISTED)]]
        info = ResultInfo(offset // max(1, limit) + 1, limit, len(shown), len(found))
        return json_response(_encoder.encode(Envelope(shown, result_info=info)))

    async def create(self, request: Request) -> Response:
        store = self._store()
        asked = parse_finetune(await read_body(request.scope, request.receive, BODY_BYTES))
        model = self._model(asked.model)
        if not is_name(asked.name):
            sentence = f"{asked.name[:100]!r} is not a valid name: use at most 100 letters, digits, '.', '_' and '-', with a letter or digit first"
            raise ApiError("invalid_request", sentence, param="name")
        check_model(request.scope, f"{asked.model}:{asked.name}")
        if self._adapters.has_public(model, asked.name):
            raise ApiError("conflict", f"{model!r} has an adapter named {asked.name!r} for all accounts", param="name")
        owner, account = tenant_in(request.scope).owner, request.scope.get(ACCOUNT, "")
        new = await asyncio.to_thread(store.create, owner, account, model, asked.name, asked.description)
        return _enveloped(new.listed())

    async def upload(self, request: Request) -> Response:
        from pilotlight.wire.forms import file_in, read_form  # imported here so that the site starts faster

        store = self._store()
        finetune = store.get(tenant_in(request.scope).owner, request.path_params["id"])
        base = await self._base(finetune.model)
        with self._uploading(), as_api_errors():
            form = await read_form(request.headers.get("content-type", ""), self._file_bytes(request, store))
        try:
            file, named = file_in(form), form.get("file_name")
            name = _file_name(named if isinstance(named, str) and named else file.filename or "")
            if name == CONFIG and (file.size or 0) > CONFIG_BYTES:
                raise ApiError("body_too_large", f"{CONFIG} has more than {CONFIG_BYTES >> 20} MiB", param="file")
            kept = await asyncio.to_thread(store.put, finetune, name, file.file, base)
        finally:
            await form.close()
        told = kept.listed()
        return _enveloped(FinetuneAsset(kept.id, name, told.created_at, told.modified_at))

    async def remove(self, request: Request) -> Response:
        store = self._store()
        finetune = store.get(tenant_in(request.scope).owner, request.path_params["id"])
        await asyncio.to_thread(store.remove, finetune.id)
        return _enveloped(finetune.listed())

    async def every(self, request: Request) -> Response:
        require_router(request.scope, "read its fine-tunes")
        return json_response(_encoder.encode(await asyncio.to_thread(self._store().everything)))

    async def one(self, request: Request) -> Response:
        """Export an adapter with its files (GET), import one (PUT), or remove one (DELETE).
        Other sites' changes arrive this way."""
        require_router(request.scope, "read its fine-tunes")
        store, id = self._store(), request.path_params["id"]
        if request.method == "DELETE":
            await asyncio.to_thread(store.remove, _id(id))
            return Response(status_code=204)
        if request.method == "GET":
            return Response(await asyncio.to_thread(_packed, store, id), media_type="application/octet-stream")
        most = self._file_limit(store) + CONFIG_BYTES
        try:
            finetune, config, weights = unpacked(await read_body(request.scope, request.receive, most))
            _id(finetune.id)
        except ValueError as error:
            raise ApiError("invalid_request", f"this is no fine-tune: {error}") from None
        finetune = msgspec.structs.replace(finetune, model=self._model(finetune.model))
        await asyncio.to_thread(store.bring, finetune, config, weights, await self._base(finetune.model))
        return Response(status_code=204)

    @contextmanager
    def _uploading(self) -> Iterator[None]:
        if self._num_uploads >= MOST_UPLOADS:
            raise ApiError(
                "overloaded", f"{MOST_UPLOADS} files are being uploaded already: retry later", retry_after_s=5
            )
        self._num_uploads += 1
        try:
            yield
        finally:
            self._num_uploads -= 1

    def _store(self) -> FinetuneStore:
        if self._adapters.finetunes is None:
            sentence = "uploads of adapters are disabled: set finetunes.directory in the site's file"
            raise ApiError("not_found", sentence)
        return self._adapters.finetunes

    def _model(self, name: str) -> str:
        """Return the main name of the model with this name or alias. Raises ApiError."""
        model = self._models.named(name)
        if self._adapters.named_in(name, model) is not None:
            raise no_model(name)
        return model

    async def _base(self, model: str) -> Shapes:
        """Return the shapes of those matrices of a model that adapters may change. Raises ApiError."""
        config = next(config for config in self._models.configs if config.name == model)
        try:
            directory = await asyncio.to_thread(local_directory, config.source)
            if directory is None and self._models.info(model) is not None:  # the model has been downloaded
                directory = await directory_of(config.source)
            if directory is None:
                sentence = f"{model!r} has not been loaded here yet, so the adapter cannot be checked: send the model a request, then retry"
                raise ApiError("overloaded", sentence, retry_after_s=REREAD_S)
            planned = await asyncio.to_thread(read_model, directory)
        except (SourceError, CheckpointError) as error:
            raise ApiError("model_load_failed", f"{model!r} cannot be read: {error}") from None
        if planned.pools:
            raise ApiError(
                "invalid_request", f"{model!r} makes embeddings, which adapters cannot change", param="model"
            )
        return planned.adapted_shapes()

    def _file_limit(self, store: FinetuneStore) -> int:
        return int(store.config.max_mib * 2**20)

    async def _file_bytes(self, request: Request, store: FinetuneStore) -> AsyncGenerator[bytes, None]:
        """Iterate over a body with a file. Raises ApiError, ClientDisconnect."""
        limit, size = self._file_limit(store), 0
        try:
            async with TimeLimit(UPLOAD_S):
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit + FORM_BYTES:
                        sentence = f"a file of a fine-tune may have {store.config.max_mib:g} MiB (finetunes.max_mib)"
                        raise ApiError("body_too_large", sentence, param="file")
                    yield chunk
        except TimeoutError:
            raise ApiError("request_timeout", f"the file did not arrive within {UPLOAD_S:g} s") from None


def _packed(store: FinetuneStore, id: str) -> bytes:
    found = next((each for each in store.everything().kept if each.id == id and each.is_whole), None)
    if found is None:
        raise ApiError("not_found", f"there is no fine-tune {id[:100]!r}")
    place = store.place(found)
    try:
        return packed(found, (place / CONFIG).read_bytes(), (place / WEIGHTS).read_bytes())
    except OSError as error:
        raise ApiError("overloaded", f"the fine-tune {id} cannot be read: {error.strerror}") from None


def _file_name(name: str) -> str:
    if name in (CONFIG, WEIGHTS):
        return name
    if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")):
        sentence = f"{name[:100]} is a pickled file, which may run any code: save the adapter as {WEIGHTS}"
    else:
        sentence = f"file_name must be {CONFIG} or {WEIGHTS}, and not {name[:100]!r}"
    raise ApiError("invalid_request", sentence, param="file_name")


def _id(id: str) -> str:
    """Return the id if it is valid, and thus safe as a file name. Raises ApiError."""
    if not is_name(id):
        raise ApiError("invalid_request", f"{id[:100]!r} is no fine-tune's id")
    return id


def _enveloped(result: Any) -> Response:
    return json_response(_encoder.encode(Envelope(result)))
