"""Makes the isolates of one version from its zygote, packages, scratch directory and code."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from pilotlight.functions.host.author_reports import AuthorReports
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.isolates.isolate_handle import IsolateHandle
from pilotlight.functions.host.isolates.scratch import Scratch
from pilotlight.functions.host.packages import Packages
from pilotlight.functions.host.response_stream import StreamThrottle
from pilotlight.functions.host.subrequests import SubrequestHandler
from pilotlight.functions.host.zygotes.pool_zygote import PoolContext, PoolZygote
from pilotlight.functions.manifest import Manifest
from pilotlight.functions.sandbox import priority
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.priority import PriorityClass
from pilotlight.functions.sandbox.zygotes.control_messages import Boot
from pilotlight.functions.sandbox.zygotes.zygote_client import ZygoteError

_numbers = itertools.count(1)


class IsolateFactory:
    def __init__(
        self,
        manifest: Manifest,
        limits: FunctionLimits,
        context: PoolContext,
        packages: Packages,
        on_subrequest: SubrequestHandler,
        reports: AuthorReports,
    ) -> None:
        self.limits = replace(
            limits,
            cpu_ms=min(limits.cpu_ms, manifest.cpu_ms or limits.cpu_ms),
            subrequests=min(limits.subrequests, manifest.subrequests or limits.subrequests),
        )
        self._function = manifest.name
        self._boot = boot_of(manifest)
        self._on_subrequest = on_subrequest
        self._reports = reports
        self._throttle = StreamThrottle(self.limits.response_mib_per_s * 2**20)
        self.scratch = Scratch(context.scratch / f"{manifest.name}-{next(_numbers)}", limits.disk_mib, context.user)
        self._user = context.user
        self._has_own_files = context.tier >= 2  # each isolate has its own file system
        self._enforcing: asyncio.Future[None] | None = None
        self._is_closed = False
        self.zygote = PoolZygote(manifest, self.limits, context, packages, self.scratch, reports.new_log)

    async def prepare(self) -> None:
        """Create the zygote before the first request. Raises ZygoteError and OSError."""
        await self.zygote.read_imports()
        self.zygote.get()

    def new(self, on_fault: Callable[[IsolateHandle, Fault], None], *, is_on_probation: bool) -> IsolateHandle:
        """Return an isolate that is not started yet."""
        return IsolateHandle(
            self._function,
            self.limits,
            self._on_subrequest,
            self._reports.new_log(),
            self._throttle,
            on_fault,
            is_on_probation=is_on_probation,
        )

    async def start(self, isolate: IsolateHandle, *, is_on_probation: bool) -> None:
        """Start an isolate; create its zygote if needed. Raises ZygoteError and OSError."""
        await self.zygote.read_imports()  # parses up to 500 files, in a thread
        if self._is_closed:
            raise ZygoteError("this version is being replaced")
        zygote = self.zygote.get()
        if priority.MAY_RETURN:
            zygote.set_priority(PriorityClass.BACKGROUND if is_on_probation else PriorityClass.NORMAL)
        await isolate.start(zygote, self._boot)

    def enforce_disk(self, isolates: Sequence[IsolateHandle]) -> None:
        """Start to check the isolates' disk usage, unless their tier limits it or a check is running."""
        if isolates and not self._has_own_files and (self._enforcing is None or self._enforcing.done()):
            self._enforcing = asyncio.ensure_future(self.scratch.enforce(isolates))

    async def close(self) -> None:
        self._is_closed = True
        if self._enforcing is not None:
            self._enforcing.cancel()
            await asyncio.gather(self._enforcing, return_exceptions=True)
        self.zygote.close()
        await self.scratch.remove()
        self._user.release()


def boot_of(manifest: Manifest) -> Boot:
    """Return the start parameters of a version's isolates."""
    path = [str(path) for path in dict.fromkeys((manifest.main.parent, manifest.directory))]
    bindings = [
        (binding.kind, binding.name, {key: value for key, value in binding.options.items() if key != "directory"})
        for binding in manifest.bindings
    ]
    return Boot(str(manifest.main), path, bindings)
