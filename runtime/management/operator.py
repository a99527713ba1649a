"""Performs operations on a running site: downloads, adds, wakes, puts to sleep and removes models."""

import asyncio
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pilotlight.engine.planning.model_plan import architecture_of
from pilotlight.runtime.fetching.errors import FetchError
from pilotlight.runtime.fetching.hub import searched
from pilotlight.runtime.management.added_models import AddedModels
from pilotlight.runtime.management.downloads import Downloads
from pilotlight.runtime.models.registry import Models
from pilotlight.runtime.models.sources import SourceError, directory_of, is_url, local_directory, name_of, source_of
from pilotlight.sites.config import ConfigError, parse, state_directory
from pilotlight.sites.site import ModelConfig, SiteConfig
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.management import (
    Catalogue,
    CatalogueModel,
    DeviceReading,
    FunctionStore,
    HubModel,
    HubQuery,
    SiteOperation,
    StorePage,
    StoreQuery,
)

if TYPE_CHECKING:
    from pilotlight.runtime.management.catalogue import LocalCatalogue

log = logging.getLogger("pilotlight.models")


class SiteOperator:
    def __init__(self, site: SiteConfig, models: Models) -> None:
        """Raises ConfigError if the file of added models cannot be read."""
        folder = site.catalogue.state_dir
        self._path = (state_directory(site.name) if folder is None else Path(folder).expanduser()) / "models.json"
        self._added = AddedModels(self._path)
        self._site = site
        self._models = models
        self._downloads = Downloads(directory_of, self._note_downloaded)

    def serve_added(self) -> None:
        """Serve the models that were added before a restart.
        A model whose name the site's file uses by now is logged and left out."""
        for config in self._added.configs():
            try:
                self._models.add(config)
            except ApiError as error:
                log.error("%s: the model %r is not served: %s", self._path, config.name, error.message)

    async def close(self) -> None:
        await self._downloads.close()

    async def catalogue(self) -> Catalogue:
        served = {state.name: state.config.source for state in self._models.states.values()}
        models, devices = await asyncio.to_thread(self._read_catalogue, served)
        return Catalogue(models, self._downloads.statuses(), devices)

    async def perform(self, operation: SiteOperation) -> None:
        """Start an operation. Raises ApiError."""
        match operation.action:
            case "wake":
                self._models.wake(self._models.registry.named(operation.model))
            case "sleep":
                await self._models.put_to_sleep(self._models.registry.named(operation.model))
            case "remove":
                await self._models.remove(self._models.registry.named(operation.model))
                self._keep()
            case "run":
                await self._run(operation)
            case "pull":
                source = _source(operation)
                # For a URL whose files are here, the download is quick and adds the URL to the list of models.
                if await asyncio.to_thread(_is_here, source) and not is_url(source):
                    raise ApiError("conflict", f"{source[:200]} is here already: run it")
                self._downloads.start(source)
            case "cancel":
                self._downloads.cancel(operation.source)
            case "drain" | "resume":
                raise ApiError("invalid_request", f"a router does {operation.action}, not a site", param="action")

    async def search_hub(self, query: HubQuery) -> tuple[HubModel, ...]:
        """Search the hub. Raises ApiError if it cannot be reached."""
        try:
            found = await searched(query.words)
        except FetchError as error:
            raise ApiError("overloaded", str(error)) from None
        return tuple(
            HubModel(each.pop("id"), architecture_of({"architectures": each.pop("architectures")}), **each)
            for each in found
        )

    async def _run(self, operation: SiteOperation) -> None:
        source = _source(operation)
        config = _config(source, operation)
        try:
            fit = await asyncio.to_thread(lambda: self._catalogue.describe(source))
        except SourceError as error:
            raise ApiError("invalid_request", str(error), param="source") from None
        if fit is not None and not fit.fits:
            raise ApiError("invalid_request", f"{source[:200]} cannot be served: {fit.reason}", param="source")
        self._models.add(config)
        self._keep()
        self._models.wake(config.name)

    @cached_property
    def _catalogue(self) -> "LocalCatalogue":
        # Imported by the first operator: plans and GGUF files are a tenth of a site's imports.
        from pilotlight.runtime.management.catalogue import LocalCatalogue

        return LocalCatalogue(self._site)

    def _read_catalogue(
        self, served: Mapping[str, str]
    ) -> tuple[tuple[CatalogueModel, ...], tuple[DeviceReading, ...]]:
        from pilotlight.runtime.management.catalogue import device_readings

        return self._catalogue.models(served, self._added.downloaded), device_readings()

    def _keep(self) -> None:
        """Write the added models to their file. Raises ApiError."""
        try:
            self._added.keep_models(state.config for state in self._models.states.values() if state.is_added)
        except OSError as error:
            sentence = f"done, but {self._path} cannot be written ({error.strerror}): the change is lost when the site restarts"
            raise ApiError("internal_error", sentence) from None

    def _note_downloaded(self, source: str) -> None:
        if not is_url(source):
            return
        try:
            self._added.note_downloaded(source)
        except OSError as error:
            log.error("%s cannot be written: %s", self._path, error)


class FunctionStores(Protocol):
    """The databases and namespaces of a site's functions."""

    async def stores(self) -> tuple[FunctionStore, ...]: ...

    async def read(self, query: StoreQuery) -> StorePage:
        """Return the content of a store. Raises ApiError."""


class OwnSite:
    """The only site of a page without a router."""

    def __init__(self, name: str, operator: SiteOperator, stores: FunctionStores | None) -> None:
        """`stores` is None if the site has no functions."""
        self._name = name
        self._operator = operator
        self._stores = stores

    async def catalogues(self) -> dict[str, Catalogue | str]:
        return {self._name: await self._operator.catalogue()}

    async def perform(self, site: str, operation: SiteOperation) -> None:
        """Start an operation. Raises ApiError, also for the name of another site."""
        self._check(site)
        await self._operator.perform(operation)

    async def search_hub(self, site: str, query: HubQuery) -> tuple[HubModel, ...]:
        """Search the hub. Raises ApiError, also for the name of another site."""
        self._check(site)
        return await self._operator.search_hub(query)

    async def stores(self) -> dict[str, tuple[FunctionStore, ...] | str]:
        return {} if self._stores is None else {self._name: await self._stores.stores()}

    async def read_store(self, site: str, query: StoreQuery) -> StorePage:
        """Return the content of a function's store. Raises ApiError."""
        self._check(site)
        if self._stores is None:
            raise ApiError("not_found", "this site serves no functions")
        return await self._stores.read(query)

    def _check(self, site: str) -> None:
        if site != self._name:
            raise ApiError("not_found", f"this is the site {self._name}, and not {site[:200]!r}")


def _source(operation: SiteOperation) -> str:
    """Return the source in an operation. Raises ApiError."""
    if not operation.source.strip():
        raise ApiError("invalid_request", "source must name a model's files", param="source")
    return source_of(operation.source.strip())


def _is_here(source: str) -> bool:
    """Return whether the source's files are on this machine. Raises ApiError if the source names nothing."""
    try:
        return local_directory(source) is not None
    except SourceError as error:
        raise ApiError("invalid_request", str(error), param="source") from None


def _config(source: str, operation: SiteOperation) -> ModelConfig:
    """Return the configuration of a model to add. Raises ApiError."""
    values = {
        "name": operation.model or name_of(source),
        "source": source,
        "residency": operation.residency,
        "lossless": operation.lossless,
        "kv_dtype": operation.kv_dtype,
        "context_tokens": operation.context_tokens,
        "sleep_after_s": operation.sleep_after_s,
        "max_devices": operation.max_devices,
    }
    try:
        return parse(ModelConfig, {name: value for name, value in values.items() if value is not None}, "run")
    except ConfigError as error:
        raise ApiError("invalid_request", str(error)) from None
