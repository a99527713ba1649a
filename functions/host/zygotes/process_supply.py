"""The isolation tier, zygotes, Python interpreters and packages for a site's functions.

Use as `async with`. Tiers are tried at the start; if none is as strong as the site file demands, the start fails.
"""

import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pilotlight.functions.host.dependencies.interpreters import Interpreters, InterpreterZygote
from pilotlight.functions.host.dependencies.layers import Layers, requirements_of
from pilotlight.functions.host.dependencies.python_versions import OWN
from pilotlight.functions.host.zygotes.pool_zygote import PoolContext
from pilotlight.functions.manifest import Manifest
from pilotlight.functions.sandbox.confinement.isolation import Isolation, IsolationTrial
from pilotlight.functions.sandbox.confinement.user_ids import FunctionUser, UserIds
from pilotlight.functions.sandbox.zygotes.site_zygote import SiteZygote
from pilotlight.functions.sandbox.zygotes.zygote_client import ZygoteFactory
from pilotlight.support import background


class Provision(NamedTuple):
    """The parts from which a pool starts processes."""

    context: PoolContext
    # runs before the first process; returns the layer of dependencies
    install: Callable[[], Awaitable[Path | None]] | None
    takes_long: bool  # whether the first process starts slowly, so that it should start before any request
    use: Callable[[], None]  # called when the pool is served
    release: Callable[[], None]  # called when the pool has ended


class ProcessSupply:
    def __init__(
        self,
        tiers: tuple[int, int],
        oci_runtime: str | None,
        state_dir: Path | None,
        layers: Layers,
        interpreters: Interpreters | None = None,
    ) -> None:
        """`tiers` are the lowest acceptable one and the highest one to try."""
        self.isolation = Isolation(0, "not tried yet")
        self._tiers = tiers
        self._oci_runtime = oci_runtime
        self._state_dir = state_dir
        self._layers = layers
        self._user_ids = UserIds()
        self._zygote = SiteZygote()
        self._zygotes: ZygoteFactory = self._zygote
        self._interpreters = interpreters or Interpreters(self._zygote, layers)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "ProcessSupply":
        """Choose the isolation tier. Raises IsolationError."""
        async with AsyncExitStack() as stack:
            if self._state_dir is None:
                self._state_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotlight-functions-")))
                self._state_dir.chmod(0o755)
            self._layers.keep_in(self._state_dir / "layers")
            stack.push_async_callback(self._layers.close)
            self._zygote.start()
            stack.callback(self._zygote.stop)
            stack.callback(self._interpreters.stop)
            stack.callback(self._user_ids.close)
            trial = IsolationTrial(
                self._zygote, FunctionUser(self._user_ids), self._oci_runtime, self._state_dir, stack
            )
            self.isolation, self._zygotes = await trial.best(*self._tiers)
            await stack.enter_async_context(background.running(self._layers.keep_pruned, "deleting unused packages"))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def provide(self, pool: str, manifest: Manifest, layers: tuple[Path, ...]) -> Provision:
        """Return the Provision for a new pool.
        Each pool needs a separate one, even if it replaces a pool of the same name.
        `layers` are directories with packages; without them, the function's dependencies are installed. Raises ManifestError."""
        assert self._state_dir is not None
        requirements = () if layers else requirements_of(manifest.directory)
        is_contained = self.isolation.tier == 3
        other = None if layers or is_contained else self._interpreters.wanted_by(pool, manifest.directory)
        context = PoolContext(
            other or self._zygotes, self.isolation.tier, FunctionUser(self._user_ids), self._state_dir / "scratch"
        )
        user = object()
        install = partial(self._install, user, requirements, other) if requirements or other else None

        def use() -> None:
            if requirements:
                self._layers.use(user, requirements, OWN if other is None else other.python)

        release = partial(self._layers.release, user)
        return Provision(context, install, bool(layers or install or is_contained), use, release)

    async def _install(
        self, user: object, requirements: tuple[str, ...], other: InterpreterZygote | None
    ) -> Path | None:
        """Start the Python that a function needs, and install its dependencies for it. Raises LayerError."""
        python = OWN if other is None else await other.start()
        if not requirements:
            return None
        if self._layers.is_used_by(user):
            self._layers.use(user, requirements, python)  # `start` may have fallen back to the site's Python
        return await self._layers.get(requirements, python)
