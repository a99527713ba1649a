"""Deployed functions: fetched from the router on demand, verified by hash, and served.

Each version has its own pool, named `NAME@DIGEST`; bindings use the plain name, which means the version with the largest share of traffic. Which
version a client gets depends only on its key, so it is the same at every site. While the router is unreachable, known versions are served.
"""

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import aiohttp
import msgspec

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import UNNUMBERED, FetchEvent
from pilotlight.functions.host.site_functions import SiteFunctions
from pilotlight.functions.manifest import Manifest, ManifestError, MisfitError, load_manifest
from pilotlight.functions.router_client import RouterClient
from pilotlight.support import atomic_files, background
from pilotlight.wire.hop.bundles import BundleError, digest_of, unpack
from pilotlight.wire.hop.deployments import PATH, Deployment, Tried, Try, Version, decode_deployments, encode
from pilotlight.wire.hop.sealed_secrets import UnsealedError, unseal

log = logging.getLogger("pilotlight.function")

POLL_S = 2.0
ASK_AGAIN_S = 1.0  # pause before the router is asked again about unknown names
PAUSE_AFTER_FAILURE_S = 5.0  # pause after a version could not be fetched or started; its requests fail during it
AT_ONCE = 16  # functions applied concurrently: each may install packages and wait for its health call
DIGEST_CHARS = 16  # characters of a version's digest in its pool's name
MISFITS = "misfits"  # error code of a version that does not fit the existing objects
HEALTHY = ".healthy"  # suffix of the file that marks a version as healthy at this site


class FunctionRegistry(Protocol):
    """The part of ServedFunctions that deployed functions use to register their versions."""

    @property
    def functions(self) -> SiteFunctions: ...

    def add(self, manifest: Manifest, *, name: str | None = None, pool: str | None = None) -> None: ...

    def moves(self, pool: str) -> tuple[str, ...]:
        """Return the migrations that rename or delete classes of objects when this version goes live."""

    async def migrate(self, pool: str) -> None:
        """Apply a version's D1 migrations, which its health call may need. Raises Failure."""

    def take_secrets(self, function: str, values: Mapping[str, str], before: Collection[str]) -> None:
        """Store the secrets `values`; delete those that only `before` names. Raises Failure."""

    def claim(self, pool: str) -> None:
        """Make the function the owner of this version's resources. Raises Failure if one has another owner."""


class KeptSecrets(msgspec.Struct, frozen=True):
    """The revision and the names of a function's secrets that a site has stored."""

    word: str = ""
    names: list[str] = []


class DeployedFunctions:
    """Serves deployed functions, as an async context manager."""

    def __init__(
        self,
        router: RouterClient,
        directory: Path,
        serving: FunctionRegistry,
        site: str,
        taken: frozenset[str],
        *,
        poll_s: float = POLL_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`site` is this site's name; `taken` are the functions of the site file."""
        self._router = router
        self._directory = directory
        self._serving = serving
        self._site = site
        self._taken = taken
        self._poll_s = poll_s
        self._now_s = now_s
        self._known: dict[str, Deployment] = {}
        self._kept: dict[str, Deployment] = {}  # as the file has them: it stays older while the disk is full
        # The deployments that clients see. A new one is added only once its version is live, because bindings of that version use the plain name.
        self._applied: dict[str, Deployment] = {}
        self._failed: dict[str, tuple[Failure, float]] = {}
        self._tried: dict[str, Try] = {}  # functions that are being tried
        self._accepted: set[str] = set()  # pools that own their resources
        self._without_secrets: set[str] = set()  # functions whose secrets could not be fetched or stored
        # By pool, held while it starts, and by digest, held while the bundle is fetched. Unused locks are removed.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()
        self._at_once = asyncio.Semaphore(AT_ONCE)
        # Held while a function's deployment is applied.
        self._applying: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._changed: set[str] = set()  # functions whose deployment has changed
        self._appliers: dict[str, asyncio.Task[None]] = {}  # the task that applies each function's deployment
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "DeployedFunctions":
        with suppress(FileNotFoundError, msgspec.DecodeError):
            self._known = self._kept = decode_deployments((self._directory / "deployments.json").read_bytes())
        self._apply_all(self._known)
        self._task = background.start(self._follow, "following deployments")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await background.stop(self._task)
        await background.stop(*self._appliers.values())

    async def pool_of(self, name: str, key: str) -> str | None:
        """Return the pool that answers a client with this key; None if the function is not deployed.
        Raises Failure if the version cannot be fetched."""
        if name in self._taken:
            return None
        if name not in self._known and self._now_s() - self._asked_at > ASK_AGAIN_S:
            with suppress(aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError):
                await self._ask()
                await self._apply(name)
        deployment = self._known.get(name)
        if deployment is not None:
            deployment = self._applied.get(name, deployment)
        if deployment is not None and not deployment.runs_at(self._site):
            raise _elsewhere(deployment)
        version = deployment.chosen(key) if deployment is not None else None
        if version is None:
            return None
        try:
            return await self._ready(name, version)
        except Failure:
            other = self._serving.functions.names.get(name)
            if other is None or other == pool_name(name, version):
                raise
            return other  # a version that cannot be fetched is replaced by the live one

    def account_of(self, name: str) -> str:
        """Return the account that owns a function; empty if the network owns it or it is not deployed."""
        known = self._known.get(name) or self._tried.get(name)
        return "" if known is None or name in self._taken else known.account

    def is_limited(self, name: str) -> bool:
        """Tell whether the calls of a function to models go through the router."""
        known = self._known.get(name) or self._tried.get(name)
        return known is not None and name not in self._taken and known.is_limited

    async def tried(self, wanted: Try) -> Tried:
        """Fetch, start and health-check a version before it gets any traffic."""
        name, version = wanted.name, wanted.version
        if name in self._taken:
            return Tried(False, f"the site file serves a function named {name} already")
        self._failed.pop(pool_name(name, version), None)
        self._tried[name] = wanted
        try:
            await self._fetch_secrets(name)
            pool = await self._started(name, version)
        except Failure as failure:
            return Tried(False, failure.detail or failure.message, misfits=failure.code == MISFITS)
        finally:
            self._tried.pop(name, None)
        return Tried(True, moves=self._serving.moves(pool))

    async def served(self, name: str, revision: int) -> Tried:
        """Fetch the deployments and start the versions of `name` at this site; return whether that worked.

        It also fails if the router has only revisions older than `revision`.
        """
        if name in self._taken:
            return Tried(False, f"the site file serves a function named {name} already")
        try:
            await self._ask()
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
            return Tried(False, f"{self._router.url} cannot be reached: {error}")
        deployment = self._known.get(name)
        if deployment is None or deployment.revision < revision:
            return Tried(False, f"{self._router.url} (the router of this site) has no revision {revision}")
        await self._apply(name)
        if not deployment.runs_at(self._site):
            return Tried(True)
        try:
            for share in deployment.shares:
                if (version := deployment.version(share.number)) is not None:
                    await self._ready(name, version)
        except Failure as failure:
            return Tried(False, failure.message)
        return Tried(True)

    # -- versions -----------------------------------------------------------------------------------------------------------------

    async def _ready(self, name: str, version: Version) -> str:
        """Return the pool of an accepted version; start it if needed. Raises Failure."""
        pool = await self._started(name, version)
        if pool not in self._accepted:
            try:
                self._serving.claim(pool)
            except Failure as error:
                self._serving.functions.remove(pool)
                raise Failure(f"version {version.number} of {name} cannot be served: {error}") from None
            self._accepted.add(pool)
        return pool

    async def _started(self, name: str, version: Version) -> str:
        pool = pool_name(name, version)
        if pool in self._serving.functions.pools:
            return pool
        async with self._locks.setdefault(pool, asyncio.Lock()):
            if pool not in self._serving.functions.pools:
                failure, until = self._failed.get(pool, (None, 0.0))
                if failure is not None and self._now_s() < until:
                    raise failure
                try:
                    folder = await self._fetched(name, version)
                    self._add(name, pool, folder, version)
                    await self._checked(pool, folder, version)
                except Failure as error:
                    now_s = self._now_s()
                    self._failed = {other: kept for other, kept in self._failed.items() if kept[1] > now_s}
                    self._failed[pool] = error, now_s + PAUSE_AFTER_FAILURE_S
                    raise
        return pool

    async def _fetched(self, name: str, version: Version) -> Path:
        folder = self._directory / version.digest
        async with self._locks.setdefault(version.digest, asyncio.Lock()):  # two functions may have the same bundle
            if not folder.is_dir():
                await self._fetch(name, version, folder)
        return folder

    async def _fetch(self, name: str, version: Version, folder: Path) -> None:
        try:
            data = await self._router.get(f"{PATH}/bundles/{version.digest}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            sentence = f"version {version.number} of {name} could not be fetched from {self._router.url}: {error}"
            raise Failure(sentence, code="overloaded", status=503) from None
        if digest_of(data) != version.digest:
            sentence = f"the bundle that {self._router.url} sent for version {version.number} of {name} differs from the deployed version"
            raise Failure(sentence, code="overloaded", status=503)
        try:
            await asyncio.to_thread(unpack_bundle, data, folder)
        except (BundleError, OSError) as error:
            raise Failure(f"version {version.number} of {name} cannot be unpacked: {error}") from None

    def _add(self, name: str, pool: str, folder: Path, version: Version) -> None:
        try:
            manifest = load_manifest(folder, version.environment)
            self._serving.add(manifest, name=name, pool=pool)
        except ManifestError as error:
            sentence = str(error).replace(f"{folder}/", "").replace(str(folder), name)
            code = MISFITS if isinstance(error, MisfitError) else "invalid_argument"
            raise Failure(f"version {version.number} of {name} cannot be served: {sentence}", code=code) from None

    async def _checked(self, pool: str, folder: Path, version: Version) -> None:
        """Do nothing if the version is healthy; otherwise remove its pool.
        A version that fails its health call gets no traffic here, even if the router lists it. Raises Failure."""
        mark = folder.with_suffix(HEALTHY)
        if mark.exists():
            return
        try:
            try:
                await self._serving.migrate(pool)
            except Failure as failure:
                raise Failure(f"its migrations were not applied: {failure.message}") from None
            url = f"http://health.internal{version.health_path}"
            health_call = FetchEvent(UNNUMBERED, "GET", url, [("host", "health")])
            response = await self._serving.functions.fetch(pool, health_call)
            if response.stream is not None:
                async for _ in response.stream:
                    pass
            if response.status >= 500:
                sentence = f"its health call GET {version.health_path} answered {response.status}"
                printed = "\n".join(await self._serving.functions.last_lines(pool))
                raise Failure(sentence, detail=f"{sentence}; it printed:\n{printed}" if printed else sentence)
        except Failure as failure:
            # a function with only queues or cron triggers has no handler for the call, but the call has imported its module
            if failure.code != "no_handler":
                self._serving.functions.remove(pool)
                raise
        mark.touch()

    async def _fetch_secrets(self, name: str, word: str | None = None) -> None:
        """Fetch a function's secrets from the router, unless the site has this revision (`word`) of them.
        A failure is logged once; each poll triggers another attempt."""
        file = self._directory / f"{name}.secrets"
        kept = KeptSecrets()
        with suppress(FileNotFoundError, msgspec.DecodeError):
            kept = msgspec.json.decode(file.read_bytes(), type=KeptSecrets)
        if word == kept.word:
            return self._without_secrets.discard(name)
        try:
            data = await self._router.get(f"{PATH}/{name}/secrets")
            sealed = msgspec.json.decode(data, type=dict[str, bytes])
            values = {secret: unseal(self._router.key, name, secret, each) for secret, each in sealed.items()}
            if values or kept.names:
                await asyncio.to_thread(self._serving.take_secrets, name, values, kept.names)
                self._directory.mkdir(parents=True, exist_ok=True)
                atomic_files.write(file, encode(KeptSecrets(kept.word if word is None else word, sorted(values))))
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, UnsealedError, Failure) as error:
            if name not in self._without_secrets:
                log.error("%s: its secrets cannot be fetched or stored: %s", name, error)
            self._without_secrets.add(name)
        else:
            self._without_secrets.discard(name)

    # -- information from the router ------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Poll the router.
        Versions with traffic are fetched as soon as they appear, because their queues and cron triggers do not wait for a request."""
        said = ""
        while True:
            try:
                await self._ask()
                self._apply_all(self._without_secrets)
                said = ""
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                if str(error) != said:
                    said = str(error)
                    log.warning("deployments cannot be fetched from %s or stored: %s", self._router.url, error)
            await asyncio.sleep(self._poll_s)

    async def _ask(self) -> None:
        async with self._asking:
            self._asked_at = self._now_s()
            known = decode_deployments(await self._router.get(PATH))
            if known != self._known:
                self._known = known
                self._apply_all(known)
            if known != self._kept:
                await asyncio.to_thread(self._keep, known)
                self._kept = known

    def _keep(self, known: Mapping[str, Deployment]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)  # readable for the users that functions run as
        atomic_files.write(self._directory / "deployments.json", encode(list(known.values())))

    def _apply_all(self, names: Iterable[str]) -> None:
        """Apply the deployment of each function in a separate task.
        A function with slow packages or a slow health call must not delay others."""
        self._changed.update(names)
        for name in self._changed - set(self._appliers):
            self._appliers[name] = asyncio.create_task(self._apply_changes(name), name=f"deployment of {name}")

    async def _apply_changes(self, name: str) -> None:
        try:
            async with self._at_once:
                while name in self._changed:
                    self._changed.discard(name)
                    try:
                        await self._apply(name)
                    except Exception:
                        log.exception("the deployment of %s could not be applied", name)
        finally:
            del self._appliers[name]

    async def _apply(self, name: str) -> None:
        """Serve a function's versions with traffic, stop the others, and delete unlisted versions."""
        async with self._applying.setdefault(name, asyncio.Lock()):
            if name not in self._known:
                return
            deployment = self._known[name]
            is_applied = name in self._without_secrets and self._applied.get(name) == deployment
            if deployment.shares and deployment.runs_at(self._site):
                await self._fetch_secrets(name, deployment.secrets)
            if is_applied and name in self._without_secrets:  # only the secrets were fetched again, in vain
                return
            wanted = await self._serve(deployment)
            self._applied[name] = deployment
            for pool in [*self._serving.functions.pools]:
                is_its = "@" in pool and pool.partition("@")[0] == name
                if is_its and pool not in wanted and not self._is_tried(pool):
                    self._serving.functions.remove(pool)
            self._accepted.intersection_update(self._serving.functions.pools)
            digests = {version.digest for deployment in self._known.values() for version in deployment.versions}
            in_use = {pool.partition("@")[2].partition(".")[0] for pool in self._serving.functions.pools}
            await asyncio.to_thread(self._forget, digests, in_use)

    async def _serve(self, deployment: Deployment) -> set[str]:
        """Serve the versions that have traffic here; return their pools."""
        wanted: set[str] = set()
        if deployment.name in self._taken or not deployment.runs_at(self._site):
            return wanted
        live = None
        for share in sorted(deployment.shares, key=lambda share: share.percent):
            version = deployment.version(share.number)
            if version is None:
                continue
            wanted.add(pool := pool_name(deployment.name, version))
            try:
                await self._ready(deployment.name, version)
                live = pool  # sorted by share: the last one has the largest
            except Failure as failure:
                log.error("%s", failure.message)
        is_live = live is not None and self._live(deployment.name, live)
        before = self._serving.functions.names.get(deployment.name)
        if not is_live and deployment.shares and before is not None:
            wanted.add(before)  # if no version can be fetched and become live, the previous one stays
        return wanted

    def _live(self, name: str, pool: str) -> bool:
        """Make a version the live one; return whether that worked."""
        try:
            self._serving.functions.live(name, pool)
        except Failure as failure:
            log.error("%s: %s", name, failure.message)
            return False
        return True

    def _is_tried(self, pool: str) -> bool:
        """Tell whether a pool is being started or health-checked; it may soon get traffic."""
        lock = self._locks.get(pool)
        return lock is not None and lock.locked()

    def _forget(self, digests: set[str], in_use: set[str]) -> None:
        """Delete the folders of versions that no longer exist, an hour after they were fetched.
        The delay protects versions that are being tried, which the router does not list yet."""
        if not self._directory.is_dir():
            return
        for path in self._directory.iterdir():
            is_named = path.name in digests or path.name[:DIGEST_CHARS] in in_use
            if path.is_dir() and not is_named and time.time() - path.stat().st_mtime > 3600:
                path.with_suffix(HEALTHY).unlink(missing_ok=True)
                shutil.rmtree(path, ignore_errors=True)


def pool_name(name: str, version: Version) -> str:
    environment = f".{version.environment}" if version.environment else ""
    return f"{name}@{version.digest[:DIGEST_CHARS]}{environment}"


def _elsewhere(deployment: Deployment) -> Failure:
    sentence = f"the function {deployment.name} runs at the site {deployment.home} only, because its data is there"
    return Failure(sentence, code="not_found", status=421)  # a router tries the next site


def unpack_bundle(data: bytes, folder: Path) -> None:
    """Unpack a bundle; the folder appears only when it is complete."""
    beside = folder.parent / f"{folder.name}.{uuid.uuid4().hex[:8]}.part"
    try:
        unpack(data, beside)
        atomic_files.let_others_read(beside)
        atomic_files.replace(beside, folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
