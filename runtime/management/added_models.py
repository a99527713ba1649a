"""Models that were added to a running site, and URLs that were downloaded.

They are stored in a file beside the site's other state, so that a restart serves them again.
"""

import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.site import ModelConfig
from pilotlight.support import atomic_files

log = logging.getLogger("pilotlight.models")


class _File(msgspec.Struct, frozen=True):
    models: tuple[dict[str, object], ...] = ()
    downloaded: tuple[str, ...] = ()


class AddedModels:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._read()

    @property
    def downloaded(self) -> tuple[str, ...]:
        """URLs of downloaded packed models, the oldest first."""
        return self._file.downloaded

    def configs(self) -> list[ModelConfig]:
        """Return the added models. One that this version cannot read is logged and left out."""
        found = []
        for values in self._file.models:
            try:
                found.append(parse(ModelConfig, values, str(self._path)))
            except ConfigError as error:
                log.error("%s", error)
        return found

    def keep_models(self, configs: Iterable[ModelConfig]) -> None:
        """Replace the models in the file. Raises OSError."""
        self._write(msgspec.structs.replace(self._file, models=tuple(map(_changed_fields, configs))))

    def note_downloaded(self, url: str) -> None:
        """Add a URL to the downloaded ones. Raises OSError."""
        others = tuple(each for each in self._file.downloaded if each != url)
        self._write(msgspec.structs.replace(self._file, downloaded=(*others, url)))

    def _write(self, file: _File) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(self._path, msgspec.json.encode(file))
        self._file = file

    def _read(self) -> _File:
        """Return the file's content. Raises ConfigError."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_File)
        except FileNotFoundError:
            return _File()
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{self._path} cannot be read ({error}); remove it, and add its models again") from None


def _changed_fields(config: ModelConfig) -> dict[str, object]:
    """Return the fields that differ from the defaults, in the form of a site's file."""
    defaults = ModelConfig(name="", source="")
    fields = msgspec.to_builtins(config)
    return {name: value for name, value in fields.items() if value != getattr(defaults, name)}
