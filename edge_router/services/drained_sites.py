"""Sites that an operator has drained, in a file of the router's state directory.

So all workers of a router send them nothing, and a restart of the router does not end a drain.
"""

import asyncio
from pathlib import Path

import msgspec

from pilotlight.sites.config import ConfigError
from pilotlight.support import atomic_files
from pilotlight.wire.errors import ApiError


class DrainedSites:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._changing = asyncio.Lock()

    def names(self) -> frozenset[str]:
        """Read the names of the drained sites. Raises ConfigError."""
        try:
            return frozenset(msgspec.json.decode(self._file.read_bytes(), type=list[str]))
        except FileNotFoundError:
            return frozenset()
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"{self._file} cannot be read ({error}): remove it to end all drains of sites") from None

    async def change(self, site: str, *, is_drained: bool) -> None:
        """Add or remove a site. Raises ApiError if the file cannot be read or written."""
        async with self._changing:
            try:
                await asyncio.to_thread(self._write, site, is_drained)
            except ConfigError as error:
                raise ApiError("internal_error", str(error)) from None
            except OSError as error:
                refusal = f"{self._file} cannot be written: {error.strerror}; nothing was changed"
                raise ApiError("overloaded", refusal, retry_after_s=60) from None

    def _write(self, site: str, is_drained: bool) -> None:
        others = self.names() - {site}
        atomic_files.write(self._file, msgspec.json.encode(sorted(others | {site} if is_drained else others)))
