"""The adapters of a site's models: from its file, a model's directory, or uploads of accounts.

Requests name an adapter as `model:adapter`, or in a separate field if the dialect has one. An adapter is read at its first request, so ten thousand
of them do not slow the start. An adapter whose files were deleted is unknown. Independent of the engine's slots and sequences.
"""

import asyncio
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pilotlight.dialects.requests import ValidGeneration
from pilotlight.engine.adapters.peft import CONFIG, WEIGHTS, AdapterError, check, describe, digest_of
from pilotlight.engine.api.protocol import AdapterSource
from pilotlight.runtime.models.finetunes import FinetuneStore
from pilotlight.sites.config import ConfigError
from pilotlight.sites.site import ModelConfig
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.finetunes import Finetune

SEPARATOR = ":"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def is_name(name: str) -> bool:
    """Tell whether an adapter's folder may have this name."""
    return _NAME.fullmatch(name) is not None


class _Version(NamedTuple):
    """The files of an adapter when they were read."""

    state: tuple[tuple[int, int], ...]  # size and modification time of each file
    digest: str


class AdapterRegistry:
    def __init__(self, models: Iterable[ModelConfig], finetunes: FinetuneStore | None = None) -> None:
        """`finetunes` are the uploads of accounts; None if the site accepts none."""
        self.finetunes = finetunes
        self._models: dict[str, ModelConfig] = {}
        self._named: dict[str, dict[str, Path]] = {}
        for config in models:
            self.add(config)
        self._read: dict[Path, _Version] = {}

    def add(self, config: ModelConfig) -> None:
        """Add the adapters of a further model."""
        self._models[config.name] = config
        self._named[config.name] = {each.name: _place(each.path) for each in config.adapters}

    def remove(self, model: str) -> None:
        del self._models[model], self._named[model]

    def names(self, model: str, owner: str = "") -> list[str]:
        """Return the names of a model's adapters, the owner's uploads included, sorted."""
        directory = self._models[model].adapters_dir
        found = set(self._named[model])
        if directory is not None:
            found |= set(_folders(_place(directory)))
        if self.finetunes is not None and owner:
            found |= {each.name for each in self.finetunes.of(owner) if each.is_whole and each.model == model}
        return sorted(found)

    def public(self) -> list[Finetune]:
        """Return the adapters that every account may use, as fine-tunes whose id is the adapter's name.

        The creation time is the modification time of the folder.
        """
        found = []
        for model in self._models:
            for name in self.names(model):
                place = self._find_public(model, name)
                with suppress(OSError):  # the folder was deleted meanwhile
                    changed_s = 0.0 if place is None else place.stat().st_mtime
                    found.append(Finetune(name, "", "", model, name, "", changed_s, changed_s, True))
        return found

    def has(self, model: str, adapter: str, owner: str) -> bool:
        return self._find(model, adapter, owner) is not None

    def has_public(self, model: str, adapter: str) -> bool:
        return self._find_public(model, adapter) is not None

    async def of(self, request: ValidGeneration, owner: str) -> AdapterSource | None:
        """Return the adapter that a request names; None for the base model.

        `owner` is the account whose uploads may be used. Raises ApiError for an unknown adapter."""
        named = self.named_in(request.requested_model, request.model)
        # The list of models that an account may use cannot express two adapters.
        if request.lora and named is not None:
            message = f"the request names two adapters, {named[:100]!r} after the model's name and {request.lora[:100]!r}: leave one out"
            raise ApiError("invalid_request", message, param="lora")
        name = request.lora or named
        if name is None:
            return None
        directory = self._find(request.model, name, owner)
        if directory is None:
            message = f"{request.model!r} has no adapter named {name[:100]!r}; see /v1/models"
            raise ApiError("model_not_found", message, param="lora" if request.lora else "model")
        try:
            state = _state_of(directory)
            known = self._read.get(directory)
            if known is None or known.state != state:
                known = self._read[directory] = _Version(state, await asyncio.to_thread(_digest, directory))
        except (AdapterError, OSError) as error:
            raise ApiError("model_load_failed", f"adapter {name!r} cannot be used: {error}") from None
        return AdapterSource(name, str(directory), known.digest)

    def named_in(self, requested: str, model: str) -> str | None:
        """Return the adapter's name in a requested model name; None for the model's own name or an alias."""
        config = self._models[model]
        return None if requested in (model, *config.aliases) else requested.rpartition(SEPARATOR)[2]

    def _find(self, model: str, adapter: str, owner: str) -> Path | None:
        """Return the folder of an adapter; None if it is unknown. The owner's uploads take precedence."""
        own = None if self.finetunes is None else self.finetunes.find(owner, adapter)
        if self.finetunes is not None and own is not None and own.is_whole and own.model == model:
            return self.finetunes.place(own)
        return self._find_public(model, adapter)

    def _find_public(self, model: str, adapter: str) -> Path | None:
        named = self._named[model].get(adapter)
        if named is not None:
            return named
        directory = self._models[model].adapters_dir
        if directory is None or not is_name(adapter):
            return None
        folder = _place(directory) / adapter
        return folder if (folder / CONFIG).is_file() else None


def refuse_unusable(models: Iterable[ModelConfig]) -> None:
    """Raise ConfigError if an adapter in a site's file cannot be used."""
    for config in models:
        for adapter in config.adapters:
            try:
                check(_place(adapter.path))
            except AdapterError as error:
                raise ConfigError(f"model {config.name!r}: adapter {adapter.name!r} cannot be used: {error}") from None


def _place(path: str) -> Path:
    """Return an absolute path, because an engine host may have another working directory."""
    return Path(path).expanduser().absolute()


def _folders(directory: Path) -> Iterator[str]:
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if is_name(entry.name) and (Path(entry.path) / CONFIG).is_file():
                    yield entry.name
    except OSError:
        return  # the directory may be created later


def _state_of(directory: Path) -> tuple[tuple[int, int], ...]:
    states = [(directory / name).stat() for name in (CONFIG, WEIGHTS) if (directory / name).exists()]
    return tuple((state.st_size, state.st_mtime_ns) for state in states)


def _digest(directory: Path) -> str:
    describe(directory)
    return digest_of(directory)
