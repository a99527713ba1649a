"""The functions of a site file: which folders are served under which names, within which limits, with what status.

Knows the site file; processes, pools and bindings are built here and known by their own modules.
"""

import os
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import TracebackType

from starlette.types import ASGIApp

from runtime.functions.limits import Limits
from runtime.functions.manifest import FILES, Manifest, ManifestError, load_manifest
from runtime.functions.site import Opener, SiteFunctions
from sites.config import FunctionsConfig, SiteConfig
from wire.status import FunctionsStatus, FunctionStatus


class ServedFunctions:
    """Use as `async with`. `functions` is there inside."""

    def __init__(
        self, config: FunctionsConfig, state_dir: Path, own_ports: Callable[[], list[int]], opener: Opener | None
    ) -> None:
        self.config = config
        self.manifests = _manifests(config)
        shared = {field.name for field in fields(Limits)} & set(FunctionsConfig.model_fields)
        limits = Limits(**{name: getattr(config, name) for name in shared})
        self.functions = SiteFunctions(
            limits=limits,
            min_tier=config.min_tier,
            state_dir=state_dir,
            egress_allow=config.egress_allow,
            own_ports=own_ports,
            open_bindings=opener,
        )

    async def __aenter__(self) -> "ServedFunctions":
        await self.functions.__aenter__()
        for name, (manifest, layers) in self.manifests.items():
            self.functions.add(manifest, name=name, layers=layers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.functions.__aexit__(kind, error, trace)

    def status(self) -> FunctionsStatus:
        isolation, pools = self.functions.isolation, self.functions.pools
        states = (
            FunctionStatus(name, len(pool.workers), sum(worker.load for worker in pool.workers), pool.num_started)
            for name, pool in sorted(pools.items())
        )
        return FunctionsStatus(isolation.tier, isolation.why_not_more, tuple(states))


def site_functions(site: SiteConfig, app: Callable[[], ASGIApp]) -> ServedFunctions | None:
    """None where the site file names no function. Raises ManifestError."""
    config = site.functions
    if not config.serve and config.directory is None:
        return None
    return ServedFunctions(config, state_dir_of(site), lambda: _ports(app), None)


def state_dir_of(site: SiteConfig) -> Path:
    if site.functions.state_dir is not None:
        return Path(site.functions.state_dir).expanduser()
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "pilotlight" / site.name


def _manifests(config: FunctionsConfig) -> dict[str, tuple[Manifest, tuple[Path, ...]]]:
    found: dict[str, tuple[Manifest, tuple[Path, ...]]] = {}
    for function in config.serve:
        layers = (Path(function.layer).expanduser(),) if function.layer is not None else ()
        for layer in layers:
            if not layer.is_dir():
                raise ManifestError(
                    f"functions.serve: the layer {function.layer!r} of {function.name!r} is no directory"
                )
        found[function.name] = load_manifest(Path(function.path).expanduser(), function.environment), layers
    if config.directory is not None:
        folder = Path(config.directory).expanduser()
        for child in sorted(folder.iterdir()) if folder.is_dir() else ():
            if any((child / name).is_file() for name in FILES):
                manifest = load_manifest(child)
                if manifest.name in found:
                    raise ManifestError(f"{child}: a function named {manifest.name!r} is served already")
                found[manifest.name] = manifest, ()
    return found


def _ports(app: Callable[[], ASGIApp]) -> list[int]:
    url: str | None = getattr(getattr(app(), "state", None), "url", None)
    return [] if url is None else [int(url.rpartition(":")[2])]
