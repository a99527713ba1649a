"""The functions that a site serves: those of its file and those that a router deploys.

This module connects pools, bindings, limits and secrets, which are implemented in other modules.
"""

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack, closing
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from starlette.types import Scope

from pilotlight.functions.bindings.binding import CLOCK, BindingError, Clock, Services
from pilotlight.functions.bindings.objects.object_migrations import MigrationError
from pilotlight.functions.bindings.owners import Owners, with_own_stores
from pilotlight.functions.bindings.queues import Queue
from pilotlight.functions.bindings.secrets.secret_store import SecretError, SecretStore
from pilotlight.functions.bindings.storage.wal_archive import delete_histories
from pilotlight.functions.bindings.usage import FunctionUsage
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.deployed import DeployedFunctions
from pilotlight.functions.function_bindings import FunctionBindings
from pilotlight.functions.host.dependencies.layers import LayerBudget, Layers
from pilotlight.functions.host.invocations.log_export import LogExport
from pilotlight.functions.host.invocations.log_store import LOGS, LogStore
from pilotlight.functions.host.pool import FunctionPool
from pilotlight.functions.host.site_functions import SiteFunctions, Trace
from pilotlight.functions.inference import Inference
from pilotlight.functions.manifest import BindingDeclaration, Manifest, ManifestError, MisfitError
from pilotlight.functions.network_inference import NetworkInference
from pilotlight.functions.router_client import RouterClient
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.site_file import manifests_of, r2_stores
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.sites.site import FunctionsConfig
from pilotlight.support import background
from pilotlight.wire.hop.headers import CLIENT_ADDRESS, DEPLOY_TOKEN_ENV, HOP_SECRET_ENV, HOPS, SESSION_AFFINITY
from pilotlight.wire.http.asgi import header

log = logging.getLogger("pilotlight.function")

DAY_S = 24 * 3600.0
SECRETS_S = 1.0  # pause between two checks for changes by `pilotlight secret`


class ServedFunctions:
    """The functions that a site serves, as an async context manager."""

    def __init__(
        self,
        config: FunctionsConfig,
        state_dir: Path,
        inference: Inference,
        own_ports: Callable[[], list[int]],
        site: str,
        trace: Trace | None = None,
        authority: str | None = None,
        clock: Clock = CLOCK,
        secrets_s: float = SECRETS_S,
    ) -> None:
        """Load the manifests; nothing is served before `__aenter__`.

        `inference` answers AI bindings. Functions may not connect to this machine's `own_ports`. `trace` opens the tracing scope of an invocation.
        `authority` is the file with the network's CA certificate. Bindings use `clock`. Raises ManifestError.
        """
        self._authority = authority
        self._clock = clock
        self._secrets_s = secrets_s
        self.config = config
        self.manifests = manifests_of(config)
        self.deployed: DeployedFunctions | None = None
        self.usage: FunctionUsage | None = None  # set while serving
        self._inference = inference
        self._state_dir, self._site = state_dir, site
        self._secrets = SecretStore(state_dir)
        # By pool: the manifest without this site's secrets, and the layers.
        self._declared: dict[str, tuple[Manifest, tuple[Path, ...]]] = {}
        self._services = Services()
        self._stack = AsyncExitStack()  # tasks that run while serving
        self._owners = Owners(state_dir, self.manifests, config.shared)
        shared = {field.name for field in fields(FunctionLimits)} & set(FunctionsConfig.__struct_fields__)
        limits = FunctionLimits(**{name: getattr(config, name) for name in shared})
        self.functions = SiteFunctions(
            limits=limits,
            min_tier=config.min_tier,
            oci_runtime=config.oci_runtime,
            state_dir=state_dir,
            egress_allow=config.egress_allow,
            own_ports=own_ports,
            zygotes_mib=config.zygotes_mib,
            layers=Layers(state_dir / "layers", LayerBudget(config.layers_mib, config.layers_days)),
            logs=LogStore(state_dir / LOGS, days=config.logs_days, mib=config.logs_mib) if config.logs_mib else None,
            log_export=LogExport(config.logs_otlp, site) if config.logs_otlp else None,
            on_cpu=self._computed,
            trace=trace,
            open_bindings=lambda manifest, functions: FunctionBindings.open(
                state_dir, self._services, manifest, functions
            ),
        )

    async def __aenter__(self) -> "ServedFunctions":
        async with AsyncExitStack() as stack:
            usage = FunctionUsage(self._state_dir, self._site, self._account_of, is_limited=self._is_limited)
            self.usage = stack.enter_context(closing(usage))
            secret, token = os.environ.get(HOP_SECRET_ENV, ""), os.environ.get(DEPLOY_TOKEN_ENV, "")
            inference, router = self._inference, None
            if self.config.deployments is not None:
                router = RouterClient(self.config.deployments.rstrip("/"), secret or token, self._authority)
                stack.push_async_callback(router.close)
                inference = NetworkInference(inference, router)
            self._services = Services(
                inference=inference,
                r2=r2_stores(self.config),
                usage=self.usage,
                clock=self._clock,
                history_s=self.config.history_days * DAY_S,
            )
            stack.push_async_callback(self._services.databases.close)
            await stack.enter_async_context(self.functions)
            if router is not None:
                kept, taken = self._state_dir / "deployed", frozenset(self.manifests)
                self.deployed = DeployedFunctions(router, kept, self, self._site, taken)
                stack.push_async_exit(self.deployed)
            for name, (manifest, layers) in self.manifests.items():
                self.add(manifest, name=name, layers=layers)
            await stack.enter_async_context(background.running(self._follow_secrets, "following secrets"))
            if not self.config.history_days:
                deleting = partial(asyncio.to_thread, delete_histories, self._state_dir)
                await stack.enter_async_context(background.running(deleting, "deleting histories"))
            if self.deployed is not None:
                await self.deployed.__aenter__()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _computed(self, function: str, cpu_s: float) -> None:
        if self.usage is not None:
            self.usage.computed(function, cpu_s)

    def _account_of(self, function: str) -> str:
        return "" if self.deployed is None else self.deployed.account_of(_loader_of(function))

    def _is_limited(self, function: str) -> bool:
        return self.deployed is not None and self.deployed.is_limited(_loader_of(function))

    def add(
        self,
        manifest: Manifest,
        *,
        name: str | None = None,
        layers: tuple[Path, ...] = (),
        pool: str | None = None,
    ) -> None:
        """Serve a function from its next request on; it replaces a function of the same name.

        `pool` is the name of one version of a deployed function, which becomes the owner of that version's resources only by `claim`. Raises
        ManifestError, with nothing changed.
        """
        served = name or manifest.name
        named = _with_version(replace(manifest, name=served), pool)  # the name that bindings and consumers use
        try:
            if pool is not None:
                named = with_own_stores(named)
            self._owners.check(named)
            self.functions.add(_with_secrets(named, self._secrets), name=pool, layers=layers)
            self._declared = {key: each for key, each in self._declared.items() if key in self.functions.pools}
            self._declared[pool or served] = named, layers
            if pool is None:
                self._owners.claim(named)
        except MigrationError as error:
            raise MisfitError(f"{manifest.directory}: {error}") from None
        except (BindingError, SecretError, OSError) as error:
            raise ManifestError(f"{manifest.directory}: {error}") from None

    async def _follow_secrets(self) -> None:
        """Restart functions whose secrets change. Runs until cancelled.

        Secrets are read at two polls after each change: a second change within the same tick of the clock has the same revision.
        """
        before, last = None, None
        while True:
            await asyncio.sleep(self._secrets_s)
            now = self._secrets.revision()
            if not before == last == now:
                await self._renew_secrets()
            before, last = last, now

    async def _renew_secrets(self) -> None:
        pools = self.functions.pools
        for name, declared in [*self._declared.items()]:
            manifest, layers = declared
            try:
                manifest = await asyncio.to_thread(_with_secrets, manifest, self._secrets)
                if self._declared.get(name) is declared and name in pools and manifest != pools[name].manifest:
                    self.functions.add(manifest, name=name, layers=layers)
                    log.info("%s restarts with the changed secrets", name)
            except (SecretError, ManifestError, Failure, OSError) as error:
                log.error("%s keeps its old secrets: %s", name, error)

    async def migrate(self, pool: str) -> None:
        """Apply the pending migrations of a version's D1 databases.
        Raises Failure if one fails; that database is then unchanged."""
        bindings = self.functions.pools[pool].bindings
        if bindings is not None:
            await bindings.migrate_databases()

    def take_secrets(self, function: str, values: Mapping[str, str], before: Collection[str]) -> None:
        """Store a function's secrets `values`; delete those that only `before` names.
        The function gets the changes within 1 s. Raises Failure."""
        try:
            for name in set(before) - set(values):
                self._secrets.delete(function, name)
            for name, value in values.items():
                self._secrets.put(function, name, value)
        except (SecretError, OSError) as error:
            raise Failure(str(error)) from None

    def queue(self, name: str) -> Queue:
        """Return a queue by name; create it if it does not exist."""
        return Queue.of(name, self._state_dir, self._services)

    def moves(self, pool: str) -> tuple[str, ...]:
        """Return the tags of migrations that rename or delete classes of objects when this version goes live."""
        bindings = self.functions.pools[pool].bindings
        return () if bindings is None else bindings.moves

    def claim(self, pool: str) -> None:
        """Make the function the owner of this version's unowned resources.
        Raises BindingError if another owner was faster."""
        self._owners.claim(self.functions.pools[pool].manifest)

    async def version_of(self, name: str, scope: Scope) -> FunctionPool:
        """Return the version that answers a request; of a deployed function, the one assigned to the client.
        Raises Failure."""
        if "+" in name or "@" in name:  # refuse dynamic workers and single versions: clients may not call them by name
            raise Failure(f"this site has no function named {name[:64]!r}", code="not_found", status=404)
        pool = None
        if self.deployed is not None and name not in self.functions.pools:
            pool = await self.deployed.pool_of(name, client_key(scope))
        return self.functions.version(pool or name)


def client_key(scope: Scope) -> str:
    """Return a key that identifies a client: its session, credentials, or address."""
    addresses = (CLIENT_ADDRESS,) if scope.get(GENUINE_HOP, False) else ()  # trust only a router's header
    for name in (SESSION_AFFINITY, "authorization", *addresses, "x-forwarded-for"):
        if (value := header(scope, name)) is not None:
            return f"{name}={value}"
    client = scope.get("client")
    is_direct = header(scope, HOPS) is None and client is not None
    return f"address={client[0]}" if is_direct and client is not None else uuid.uuid4().hex


def _loader_of(function: str) -> str:
    """Return the deployed function that has loaded a dynamic worker, which is named LOADER+ID."""
    return function.partition("+")[0]


def _with_version(manifest: Manifest, pool: str | None) -> Manifest:
    """Set the version metadata; `id` is the same for the same deployed bytes."""
    since = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    version = {
        "id": str(uuid.uuid5(uuid.NAMESPACE_OID, pool or f"{manifest.name} {since}")),
        "tag": "",
        "timestamp": since,
    }
    bindings = (
        BindingDeclaration("var", each.name, {"value": version}) if each.kind == "version_metadata" else each
        for each in manifest.bindings
    )
    return replace(manifest, bindings=tuple(bindings))


def _with_secrets(manifest: Manifest, secrets: SecretStore) -> Manifest:
    """Add this site's secrets; they override vars and local secrets of the same name."""
    kept = secrets.values(manifest.name)
    if not kept:
        return manifest
    declared = tuple(binding for binding in manifest.bindings if binding.name not in kept)
    put = tuple(BindingDeclaration("secret", name, {"value": value}) for name, value in kept.items())
    return replace(manifest, bindings=declared + put)
