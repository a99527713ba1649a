"""A site's handling of deployments, with a stand-in for the router and isolates: which version each caller gets."""

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.frames import FetchEvent
from pilotlight.functions.deployed import ASK_AGAIN_S, HEALTHY, PAUSE_AFTER_FAILURE_S, DeployedFunctions, pool_name
from pilotlight.functions.host.site_functions import Response
from pilotlight.functions.manifest import Manifest
from pilotlight.wire.hop.bundles import digest_of, pack
from pilotlight.wire.hop.deployments import PATH, Deployment, Share, Try, Version, decode_deployments, encode
from tests.asgi import eventually
from tests.full_disk import files_of_at_most


class Router:
    url = "http://router"

    def __init__(self) -> None:
        self.deployments: list[Deployment] = []
        self.bundles: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.is_away = False
        self.secrets_fail = False
        self.late: dict[str, asyncio.Event] = {}  # paths that are answered when their event is set

    async def get(self, path: str) -> bytes:
        self.asked.append(path)
        if self.is_away:
            raise OSError("no server there")
        if (may_answer := self.late.get(path)) is not None:
            await may_answer.wait()
        if path.endswith("/secrets"):
            if self.secrets_fail:
                raise OSError("no answer")
            return b"{}"
        return encode(self.deployments) if path == PATH else self.bundles[path.rpartition("/")[2]]

    def deploy(
        self,
        name: str,
        *shares: tuple[Version, float],
        revision: int = 1,
        account: str = "",
        home: str = "",
        secrets: str = "",
        is_limited: bool = False,
    ) -> None:
        versions = tuple(version for version, _ in shares)
        parts = tuple(Share(v.number, percent) for v, percent in shares)
        told = Deployment(name, revision, versions, parts, account, home, secrets, is_limited)
        self.deployments = [*(each for each in self.deployments if each.name != name), told]


class Functions:
    """Stand-ins for functions; the test sets their versions, health calls and owners."""

    def __init__(self) -> None:
        self.pools: dict[str, Manifest] = {}
        self.names: dict[str, str] = {}
        self.status = 200
        self.failure: Failure | None = None
        self.calls: list[str] = []
        self.of_others: set[str] = set()
        self.not_startable: set[str] = set()
        self.slow: dict[str, asyncio.Event] = {}
        self.streamed: list[bytes] = []
        self.functions = self

    def add(self, manifest: Manifest, *, name: str, pool: str) -> None:
        self.pools[pool] = manifest

    def remove(self, pool: str) -> None:
        self.pools.pop(pool, None)
        self.names = {name: live for name, live in self.names.items() if live != pool}

    def live(self, name: str, pool: str) -> None:
        if pool in self.not_startable:
            raise Failure("its queue is another function's")
        self.names[name] = pool

    def moves(self, pool: str) -> tuple[str, ...]:
        return ()

    async def migrate(self, pool: str) -> None: ...

    async def last_lines(self, pool: str) -> list[str]:
        return []

    def claim(self, pool: str) -> None:
        if pool in self.of_others:
            raise Failure("its store is another's")

    async def fetch(self, pool: str, event: FetchEvent) -> Response:
        self.calls.append(event.url)
        if (may_answer := self.slow.get(pool.partition("@")[0])) is not None:
            await may_answer.wait()
        if self.failure is not None:
            raise self.failure

        async def stream() -> AsyncIterator[bytes]:
            self.streamed.append(b"read")
            yield b"health"

        return Response(self.status, [], b"", stream())


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder / "state", 1000.0
        self.router, self.functions, self._made = Router(), Functions(), folder / "made"
        self.deployed = self.new()

    def new(self, poll_s: float = 3600.0) -> DeployedFunctions:
        serving: Any = self.functions
        router: Any = self.router
        taken = frozenset({"taken"})
        return DeployedFunctions(router, self.folder, serving, "ams1", taken, poll_s=poll_s, now_s=lambda: self.now)

    def version(self, number: int, name: str = "f", **more: Any) -> Version:
        folder = self._made / f"{name}{number}"
        folder.mkdir(parents=True)
        (folder / "entry.py").write_text(f"# {number}")
        (folder / "wrangler.toml").write_text(f'name = "{name}"\nmain = "entry.py"\n')
        data = pack(folder)
        self.router.bundles[digest_of(data)] = data
        return Version(number, digest_of(data), 0.0, **more)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(tmp_path)
    async with made.deployed:
        await eventually(lambda: made.router.asked == [PATH])  # at once
        yield made


async def test_a_function_whose_home_is_elsewhere_is_not_served_here_and_no_longer_once_it_moves(site: Site) -> None:
    version = site.version(1)
    pool = pool_name("f", version)
    for home, revision, is_here in (("ams1", 1, True), ("iad1", 2, False), ("", 3, True)):
        site.router.deploy("f", (version, 100.0), revision=revision, home=home)
        assert (await site.deployed.served("f", revision)).healthy, "the site has this revision"
        assert list(site.functions.pools) == ([pool] if is_here else [])
        if is_here:
            assert await site.deployed.pool_of("f", "key") == pool
            continue
        with pytest.raises(Failure, match="runs at the site iad1 only") as refused:
            await site.deployed.pool_of("f", "key")
        assert (refused.value.code, refused.value.status) == ("not_found", 421)


async def test_a_slow_function_holds_back_no_other_and_no_request_for_an_unknown_name(site: Site) -> None:
    slow, other, late = site.version(1, "slow"), site.version(1, "other"), site.version(1, "late")
    may_answer = site.functions.slow["slow"] = asyncio.Event()
    site.router.deploy("slow", (slow, 100.0))
    site.router.deploy("other", (other, 100.0))
    site.now += 60.0
    async with asyncio.timeout(30.0):
        assert await site.deployed.pool_of("unknown", "key") is None
        await eventually(lambda: "other" in site.functions.names)
        site.router.deploy("late", (late, 100.0))
        site.now += 60.0
        assert await site.deployed.pool_of("late", "key") == pool_name("late", late)
        await eventually(lambda: "late" in site.functions.names)
        assert "slow" not in site.functions.names
        may_answer.set()
        await eventually(lambda: site.functions.names.get("slow") == pool_name("slow", slow))


async def test_what_changes_while_a_function_is_started_is_applied_afterwards(site: Site) -> None:
    first, second = site.version(1), site.version(2)
    may_answer = site.functions.slow["f"] = asyncio.Event()
    for revision, version in enumerate((first, second, first, second), 1):
        site.router.deploy("f", (version, 100.0), revision=revision)
        site.now += 60.0
        assert await site.deployed.pool_of("unknown", "key") is None
        await asyncio.sleep(0)
    may_answer.set()
    await eventually(lambda: site.functions.names.get("f") == pool_name("f", second))
    await eventually(lambda: set(site.functions.pools) == {pool_name("f", second)})


async def test_a_function_without_traffic_is_not_served(site: Site) -> None:
    version = site.version(1)
    for shares, pools in ([(version, 100.0)], [pool_name("f", version)]), ([], []):
        site.router.deploy("f", *shares, revision=2 - len(shares))
        assert (await site.deployed.served("f", 1)).healthy
        assert list(site.functions.pools) == pools
    assert await site.deployed.pool_of("f", "key") is None


async def test_an_unknown_name_is_requested_now_and_then_and_one_of_the_site_file_never(site: Site) -> None:
    before = len(site.router.asked)
    site.now += ASK_AGAIN_S + 0.1
    for after_s, times in ((0.0, 1), (ASK_AGAIN_S, 1), (0.1, 2)):
        site.now += after_s
        assert await site.deployed.pool_of("f", "key") is None
        assert len(site.router.asked) == before + times
    site.router.is_away = True
    site.now += ASK_AGAIN_S + 0.1
    assert await site.deployed.pool_of("f", "key") is None
    assert await site.deployed.pool_of("taken", "key") is None
    assert len(site.router.asked) == before + 3


async def test_a_version_is_fetched_checked_and_served_once(site: Site) -> None:
    version = site.version(1, health_path="/up")
    site.router.deploy("f", (version, 100.0), account="acme")
    site.now += 60.0
    pools = {await site.deployed.pool_of("f", key) for key in ("a", "b")}
    assert pools == {pool_name("f", version)} == set(site.functions.pools)
    assert site.functions.names == {"f": pool_name("f", version)}
    assert (site.functions.calls, site.functions.streamed) == (["http://health.internal/up"], [b"read"])
    assert site.router.asked.count(f"{PATH}/bundles/{version.digest}") == 1
    assert [site.deployed.account_of(name) for name in ("f", "g", "taken")] == ["acme", "", ""]
    site.functions.pools.clear()
    assert await site.deployed.pool_of("f", "a") == pool_name("f", version)
    assert len(site.functions.calls) == 1, "the health call is not repeated"


async def test_what_is_known_is_served_on_while_the_router_is_away(site: Site) -> None:
    version = site.version(1)
    site.router.deploy("f", (version, 100.0))
    site.now += 60.0
    await site.deployed.pool_of("f", "key")
    site.router.is_away = True
    site.functions.pools.clear()
    num_asked = len(site.router.asked)
    async with site.new() as again:
        await eventually(lambda: len(site.router.asked) > num_asked)
        assert await again.pool_of("f", "key") == pool_name("f", version)
        told = await again.served("f", 1)
        assert (told.healthy, "cannot be reached: no server there" in told.detail) == (False, True)


async def test_a_full_disk_holds_back_no_deployment_which_is_stored_once_there_is_room(site: Site) -> None:
    site.router.deploy("f", (site.version(1), 100.0))
    assert (await site.deployed.served("f", 1)).healthy
    site.router.deploy("f", revision=2)
    with files_of_at_most(1):
        told = await site.deployed.served("f", 2)
    assert (told.healthy, "File too large" in told.detail) == (False, True)
    await eventually(lambda: not site.functions.pools)
    assert (await site.deployed.served("f", 2)).healthy
    assert decode_deployments((site.folder / "deployments.json").read_bytes())["f"].revision == 2


async def test_a_bundle_that_differs_from_the_deployed_one_is_not_served_and_requested_again_later(site: Site) -> None:
    version, other = site.version(1), site.version(2)
    right = site.router.bundles[version.digest]
    site.router.bundles[version.digest] = site.router.bundles[other.digest]
    site.router.deploy("f", (version, 100.0))
    site.now += 60.0
    for after_s in (0.0, PAUSE_AFTER_FAILURE_S - 0.1):
        site.now += after_s
        with pytest.raises(Failure, match="differs from the deployed version") as refused:
            await site.deployed.pool_of("f", "key")
        assert refused.value.status == 503
    path = f"{PATH}/bundles/{version.digest}"
    assert (site.router.asked.count(path), site.functions.pools) == (1, {})
    assert not (site.folder / version.digest).exists()
    site.router.bundles[version.digest] = right
    with pytest.raises(Failure):
        await site.deployed.pool_of("f", "key")
    site.now += 0.1
    assert await site.deployed.pool_of("f", "key") == pool_name("f", version)
    assert site.router.asked.count(path) == 2


@pytest.mark.parametrize(
    ("status", "failure", "is_served"),
    [
        (499, None, True),
        (500, None, False),
        (200, Failure("no fetch here", code="no_handler"), True),
        (200, Failure("it breaks", code="import_failed", detail="where"), False),
    ],
)
async def test_a_version_whose_health_call_fails_takes_no_traffic_here(
    site: Site, status: int, failure: Failure | None, is_served: bool
) -> None:
    version = site.version(1)
    site.functions.status, site.functions.failure = status, failure
    told = await site.deployed.tried(Try("f", version))
    assert told.healthy is is_served
    assert (pool_name("f", version) in site.functions.pools) is is_served
    assert (site.folder / version.digest).with_suffix(HEALTHY).exists() is is_served
    if not is_served:
        assert told.detail == ("where" if failure else "its health call GET / answered 500")
        site.functions.status, site.functions.failure = 200, None
        assert (await site.deployed.tried(Try("f", version))).healthy, "a new trial is not delayed"
    assert not (await site.deployed.tried(Try("taken", version))).healthy


async def test_what_a_functions_first_health_call_uses_is_its_accounts(site: Site) -> None:
    seen = []
    fetch = site.functions.fetch

    async def noted(pool: str, event: FetchEvent) -> Response:
        seen.append((site.deployed.account_of("f"), site.deployed.is_limited("f")))
        return await fetch(pool, event)

    site.functions.fetch = noted
    assert (await site.deployed.tried(Try("f", site.version(1), "acme", is_limited=True))).healthy
    assert (seen, site.deployed.account_of("f")) == ([("acme", True)], "")


async def test_an_account_that_gets_limits_has_them_without_another_deployment(site: Site) -> None:
    version = site.version(1)
    for is_limited in (False, True):
        site.router.deploy("f", (version, 100.0), account="acme", is_limited=is_limited)
        site.now += 60.0
        await site.deployed.served("f", 1)
        assert site.deployed.is_limited("f") is is_limited
    assert not site.deployed.is_limited("unknown")


async def test_a_version_that_names_anothers_store_is_not_served_and_the_one_before_answers(site: Site) -> None:
    first, second = site.version(1), site.version(2)
    site.functions.of_others.add(pool_name("f", second))
    site.router.deploy("f", (second, 100.0))
    site.now += 60.0
    with pytest.raises(Failure, match="cannot be served: its store is another's"):
        await site.deployed.pool_of("f", "key")
    assert site.functions.pools == {}
    told = await site.deployed.served("f", 1)
    assert (told.healthy, "another's" in told.detail) == (False, True)
    site.router.deploy("f", (first, 100.0), revision=2)
    assert (await site.deployed.served("f", 2)).healthy
    site.router.deploy("f", (second, 100.0), revision=3)
    assert not (await site.deployed.served("f", 3)).healthy
    assert await site.deployed.pool_of("f", "key") == pool_name("f", first)


async def test_a_revision_is_served_when_the_router_that_is_asked_knows_it(site: Site) -> None:
    site.router.deploy("f", (site.version(1), 100.0), revision=3)
    assert [(await site.deployed.served("f", revision)).healthy for revision in (2, 3, 4)] == [True, True, False]
    assert not (await site.deployed.served("g", 1)).healthy
    assert not (await site.deployed.served("taken", 1)).healthy


async def test_the_version_with_most_of_the_traffic_is_live_and_those_without_any_go(site: Site) -> None:
    first, second, third = (site.version(number) for number in (1, 2, 3))
    site.router.deploy("f", (second, 30.0), (first, 70.0))
    assert (await site.deployed.served("f", 1)).healthy
    assert set(site.functions.pools) == {pool_name("f", first), pool_name("f", second)}
    assert site.functions.names["f"] == pool_name("f", first)
    site.functions.pools["of the site file"] = site.functions.pools[pool_name("f", first)]
    site.functions.pools["unknown@1"] = site.functions.pools[pool_name("f", first)]
    site.router.deploy("f", (third, 60.0), (second, 40.0), revision=2)
    assert (await site.deployed.served("f", 2)).healthy
    assert set(site.functions.pools) == {
        pool_name("f", second), pool_name("f", third), "of the site file", "unknown@1",
    }  # fmt: skip
    assert site.functions.names["f"] == pool_name("f", third)
    chosen = {await site.deployed.pool_of("f", f"client {i}") for i in range(40)}
    assert chosen == {pool_name("f", second), pool_name("f", third)}


async def test_clients_get_a_new_version_when_it_is_live_and_not_before(site: Site) -> None:
    first, second = site.version(1), site.version(2)
    site.router.deploy("f", (first, 100.0))
    assert (await site.deployed.served("f", 1)).healthy
    fetched = f"{PATH}/bundles/{second.digest}"
    may_answer = site.router.late[fetched] = asyncio.Event()
    site.router.deploy("f", (second, 100.0), revision=2)
    serving = asyncio.create_task(site.deployed.served("f", 2))
    await eventually(lambda: fetched in site.router.asked)
    assert await site.deployed.pool_of("f", "key") == pool_name("f", first)
    may_answer.set()
    assert (await serving).healthy
    assert await site.deployed.pool_of("f", "key") == pool_name("f", second) == site.functions.names["f"]


async def test_a_version_that_cannot_be_had_leaves_the_one_before_where_it_is(site: Site) -> None:
    first, second = site.version(1), site.version(2)
    site.router.deploy("f", (first, 100.0))
    assert (await site.deployed.served("f", 1)).healthy
    del site.router.bundles[second.digest]
    site.router.bundles[second.digest] = b"something else"
    site.router.deploy("f", (second, 100.0), revision=2)
    assert not (await site.deployed.served("f", 2)).healthy
    assert (list(site.functions.pools), site.functions.names["f"]) == ([pool_name("f", first)], pool_name("f", first))
    assert await site.deployed.pool_of("f", "key") == pool_name("f", first)


async def test_a_version_that_cannot_become_live_leaves_the_one_before_live_until_it_can(site: Site) -> None:
    first, second = site.version(1), site.version(2)
    site.router.deploy("f", (first, 100.0))
    assert (await site.deployed.served("f", 1)).healthy
    site.functions.not_startable = {pool_name("f", second)}
    site.router.deploy("f", (second, 100.0), revision=2)
    assert (await site.deployed.served("f", 2)).healthy
    assert site.functions.names["f"] == pool_name("f", first)
    assert set(site.functions.pools) == {pool_name("f", first), pool_name("f", second)}
    site.functions.not_startable = set()
    site.router.deploy("f", (second, 100.0), revision=3)
    assert (await site.deployed.served("f", 3)).healthy
    assert (site.functions.names["f"], list(site.functions.pools)) == (pool_name("f", second), [pool_name("f", second)])


async def test_versions_that_are_gone_leave_no_locks_and_failures_in_memory(site: Site) -> None:
    alive = []
    for number in range(1, 9):
        site.functions.status = 500 if number % 2 else 200
        site.router.deploy("f", (site.version(number), 100.0), revision=number)
        assert (await site.deployed.served("f", number)).healthy == (number % 2 == 0)
        site.now += PAUSE_AFTER_FAILURE_S + 1
        gc.collect()
        alive.append([sum(type(each) is kind for each in gc.get_objects()) for kind in (asyncio.Lock, Failure)])
    assert alive[1] == alive[-1]


async def test_folders_of_versions_that_are_gone_are_deleted_after_an_hour(site: Site) -> None:
    first, second = site.version(1), site.version(2)
    site.router.deploy("f", (first, 100.0))
    assert (await site.deployed.served("f", 1)).healthy
    folder = site.folder / first.digest
    kept = site.folder / "someone's"
    kept.mkdir()
    for revision, age_s in ((2, 3500), (3, 3700)):
        os.utime(folder, (time.time() - age_s,) * 2)
        site.router.deploy("f", (second, 100.0), revision=revision)
        assert (await site.deployed.served("f", revision)).healthy
        assert folder.exists() == folder.with_suffix(HEALTHY).exists() == (age_s < 3600)
    assert kept.exists(), "too young to be deleted"
    os.utime(site.folder / second.digest, (0, 0))
    site.router.deploy("f", (second, 100.0), revision=4)
    assert (await site.deployed.served("f", 4)).healthy
    assert (site.folder / second.digest).exists(), "a version still uses it"


def test_a_pool_is_named_by_its_version_and_environment() -> None:
    version = Version(1, "ab" * 32, 0.0)
    assert pool_name("f", version) == "f@abababababababab"
    assert pool_name("f", cast(Any, Version(1, "ab" * 32, 0.0, environment="staging"))) == "f@abababababababab.staging"


async def test_secrets_that_could_not_be_fetched_are_fetched_at_a_later_poll(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.router.deploy("f", (site.version(1), 100.0), secrets="first")
    site.router.secrets_fail = True
    polling = site.new(poll_s=0.005)

    def num_attempts() -> int:
        return sum(path.endswith("/secrets") for path in site.router.asked)

    async with polling:
        await eventually(lambda: num_attempts() >= 3)
        site.router.secrets_fail = False
        failed = num_attempts()
        await eventually(lambda: num_attempts() > failed)
        succeeded, polls = num_attempts(), len(site.router.asked)
        await eventually(lambda: len(site.router.asked) >= polls + 10)
        assert num_attempts() <= succeeded + 1
    assert caplog.text.count("its secrets cannot be fetched") == 1


async def test_a_version_that_fails_without_its_secrets_is_started_again_when_they_are_there(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.router.deploy("f", (site.version(1), 100.0), secrets="first")
    site.router.secrets_fail, site.functions.status = True, 500
    async with site.new(poll_s=0.005):
        await eventually(lambda: len(site.functions.calls) == 1)
        asked = len(site.router.asked)
        await eventually(lambda: len(site.router.asked) >= asked + 20)
        site.now += PAUSE_AFTER_FAILURE_S + 1
        await eventually(lambda: len(site.router.asked) >= asked + 40)
        assert len(site.functions.calls) == 1, "nothing has changed"
        assert caplog.text.count("its health call") == 1
        site.router.secrets_fail, site.functions.status = False, 200
        await eventually(lambda: "f" in site.functions.names)
