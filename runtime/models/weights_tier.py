"""The site's weights in host memory: one file per model, in a directory that outlives engine hosts.

An engine host writes a model's file, or maps the existing one. This module decides which models may have a file, and deletes files. The memory of a
deleted file is free when the last host unmaps it, so only sleeping models' files are worth deleting. A new runtime adopts the files of a killed one.
Independent of the files' contents.
"""

import hashlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from pilotlight.runtime.hosts.memory import gib
from pilotlight.runtime.hosts.tier_directory import TierDirectory

log = logging.getLogger("pilotlight.models")

_ENDING = ".weights"
_UNFINISHED = ".partial"  # suffix of a file that an engine host is writing (engine/weights/bundles/bundle_file.py)


class WeightsTier:
    def __init__(self, place: TierDirectory, directory: Path, limit_bytes: int) -> None:
        self._place = place
        self._directory = directory
        self.limit_bytes = limit_bytes

    def file_of(self, model: str) -> Path:
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model)[-40:].strip(".-")
        return self._directory / f"{readable}-{hashlib.sha256(model.encode()).hexdigest()[:12]}{_ENDING}"

    def bytes_of(self, model: str) -> int:
        """Return the size of the model's file; 0 if there is none."""
        return _size(self.file_of(model))

    def held_for(self, model: str) -> int:
        """Return the size of the model's file; a file that is being written counts with its final size."""
        return max([self.bytes_of(model), *(_size(path) for path in self._unfinished(model))])

    def remove(self, model: str) -> None:
        """Remove the model's file. An engine host that is still writing it notices this and stops."""
        for path in (self.file_of(model), *self._unfinished(model)):
            path.unlink(missing_ok=True)

    def _unfinished(self, model: str) -> list[Path]:
        return list(self._directory.glob(f"{self.file_of(model).name}.*{_UNFINISHED}"))

    def adopt(self, models: Iterable[str]) -> None:
        """Keep the files of these models and delete all others. The engine checks a file before use."""
        known = {self.file_of(model) for model in models}
        for path in self._directory.iterdir():
            if path in known:
                log.info("adopted %s, %s", path.name, gib(path.stat().st_size))
            elif path.suffix != ".lock":
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the directory, after the last engine host has ended."""
        self._place.remove()


def _size(path: Path) -> int:
    """Return a file's size in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
