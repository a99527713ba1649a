"""The zygote of one version of a function: made for the first request, kept for a while when idle."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pilotlight.functions.host.dependencies.imports import imports_of
from pilotlight.functions.host.isolates.scratch import Scratch
from pilotlight.functions.host.logs import FunctionLog
from pilotlight.functions.host.packages import Packages
from pilotlight.functions.manifest import Manifest
from pilotlight.functions.sandbox.confinement.confinement import Confinement
from pilotlight.functions.sandbox.confinement.user_ids import FunctionUser
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.zygotes.zygote_client import FunctionZygote, ZygoteFactory

SETTLED_S = 3.0  # after this idle time all imports have finished


@dataclass(frozen=True)
class PoolContext:
    """The site's resources that each function's pool needs."""

    zygotes: ZygoteFactory
    tier: int
    user: FunctionUser
    scratch: Path


class PoolZygote:
    def __init__(
        self,
        manifest: Manifest,
        limits: FunctionLimits,
        context: PoolContext,
        packages: Packages,
        scratch: Scratch,
        new_log: Callable[[], FunctionLog],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.current: FunctionZygote | None = None
        self.asleep_since: float | None = None  # when its last isolate ended
        # memory after all imports; measured once, because there may be thousands of zygotes
        self.asleep_mib: int | None = None
        self._manifest = manifest
        self._limits = limits
        self._context = context
        self._packages = packages
        self._scratch = scratch
        self._new_log = new_log
        self._clock = clock
        self._imports: list[str] | None = None  # imports found in its files; None until they are parsed
        self._log: FunctionLog | None = None

    @property
    def is_alive(self) -> bool:
        return self.current is not None and self.current.is_alive

    async def read_imports(self) -> None:
        """Find the imports of the function's files in a thread, so that `get` need not block for that."""
        if self._imports is None:
            self._imports = await asyncio.to_thread(imports_of, self._manifest)

    def get(self) -> FunctionZygote:
        """Return a living zygote, created if needed. Raises ZygoteError and OSError."""
        if self.current is None or not self.current.is_alive:
            self.current = self._create()
        return self.current

    def watch(self, *, is_asleep: bool) -> str:
        """Check the zygote once; return why it must be ended, empty if it need not."""
        now = self._clock()
        if not is_asleep or self.current is None:
            self.asleep_since = self.asleep_mib = None
        elif self.asleep_since is None:
            self.asleep_since = now
        elif self.asleep_mib is None and now - self.asleep_since > SETTLED_S:
            self.asleep_mib = self.current.memory_mib
        return "" if self.current is None else self.current.why_ended(self._limits, is_asleep=is_asleep)

    def fail(self, why: str) -> None:
        """End the zygote and all its isolates, which may run the same code."""
        if self.current is not None:
            self.current.fail(why)
            self.current.close()
            self.current = None

    def close(self) -> None:
        if self.current is not None:
            self.current.close()
            self.current = self.asleep_since = self.asleep_mib = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _create(self) -> FunctionZygote:
        self.close()
        context, limits = self._context, self._limits
        if context.tier < 2:  # higher tiers have /tmp in memory instead
            self._scratch.make()
        confinement = Confinement(
            tier=context.tier,
            folder=str(self._manifest.directory),
            layers=self._packages.layers,
            scratch=str(self._scratch.path.resolve()),
            uid=context.user.id,
            memory_mib=limits.memory_mib,
            disk_mib=limits.disk_mib,
            open_files=limits.open_files,
            threads=limits.threads,
            isolates=limits.max_isolates,
        )
        self._log = self._new_log()
        try:
            if self._imports is None:
                self._imports = imports_of(self._manifest)
            return context.zygotes.create_zygote(confinement, self._imports, self._log.write_fd)
        finally:
            self._log.close_write_end()
