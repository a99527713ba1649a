"""Choose the isolation tier: the strongest one that works on this machine.

A site does not start below the tier that its file demands.
"""

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from pilotlight.functions.sandbox.confinement.confinement import Confinement
from pilotlight.functions.sandbox.confinement.oci import Containers
from pilotlight.functions.sandbox.confinement.user_ids import FunctionUser
from pilotlight.functions.sandbox.zygotes.site_zygote import SiteZygote
from pilotlight.functions.sandbox.zygotes.zygote_client import ZygoteError, ZygoteFactory, try_tier
from pilotlight.sites.config import ConfigError


class IsolationError(ConfigError):
    """The machine does not offer the isolation tier that the site file demands."""


class Isolation(NamedTuple):
    """The tier in use, and why stronger ones do not work."""

    tier: int
    why_not_more: str


class IsolationTrial:
    def __init__(
        self, zygote: SiteZygote, user: FunctionUser, oci_runtime: str | None, state_dir: Path, stack: AsyncExitStack
    ) -> None:
        """`stack` closes the resources of the chosen tier."""
        self._zygote = zygote
        self._user = user
        self._oci_runtime = oci_runtime
        self._state_dir = state_dir
        self._stack = stack

    async def best(self, min_tier: int, max_tier: int) -> tuple[Isolation, ZygoteFactory]:
        """Return the strongest tier that works, and its zygote factory.
        Raises IsolationError if that tier is lower than `min_tier`."""
        reasons: list[str] = []
        (scratch := self._state_dir / "scratch").mkdir(parents=True, exist_ok=True)
        scratch.chmod(0o755)  # despite the site's umask
        for tier in range(max_tier, 0, -1):
            factory: ZygoteFactory = self._zygote
            if tier == 3:
                containers = await self._containers()
                if isinstance(containers, str):
                    reasons.append(f"tier 3: {containers}")
                    continue
                factory = containers
            limits = Confinement(
                tier, str(scratch.resolve()), [], str(scratch.resolve()), self._user.id, 256, 16, 64, 64
            )
            why = await try_tier(factory, limits)
            if not why:
                return _demanded(Isolation(tier, "; ".join(reasons)), min_tier), factory
            reasons.append(f"tier {tier}: {why}")
        return _demanded(Isolation(0, "; ".join(reasons)), min_tier), self._zygote

    async def _containers(self) -> Containers | str:
        """Return the containers, or why they are unavailable.
        Raises IsolationError if the site file names a runtime that is not installed."""
        if self._oci_runtime is None:
            return "functions.oci_runtime names no OCI runtime (crun, runc)"
        try:
            containers = Containers(self._oci_runtime, self._state_dir / "oci")
        except ZygoteError as error:
            raise IsolationError(str(error)) from None
        if os.getuid() != 0:
            return f"{containers.name} needs a site that was started as root"
        await containers.open()
        self._stack.push_async_callback(containers.close)
        return containers


def _demanded(reached: Isolation, min_tier: int) -> Isolation:
    if reached.tier >= max(1, min_tier):
        return reached
    raise IsolationError(
        f"this machine offers isolation of tier {reached.tier}, and {max(1, min_tier)} is demanded ({reached.why_not_more}); "
        "lower functions.min_tier or allow what is missing"
    )
