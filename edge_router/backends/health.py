"""Probe every site's /status while the router runs, and report the results to its Backend.

A probe also measures the round trip. Clock, sleep and randomness are injected; the Backend decides how many failures make a site unhealthy.
"""

import asyncio
import logging
import random
import uuid
from collections.abc import Awaitable, Callable, Collection
from types import SimpleNamespace
from typing import NamedTuple

import aiohttp
import msgspec

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.backends.site_sessions import reason_of
from pilotlight.sites.network import HealthConfig
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.hop.headers import CLOCK, HOP, HOP_SECRET_ENV, REFUSAL, REQUEST_ID, Hop, sign_hop, told_clock
from pilotlight.wire.hop.status import decode_status

JITTER = 0.2  # share of the interval by which it varies: routers that start together must not probe together
STARTING_SHARE = 0.25  # share of the interval while a site has never been healthy, because it is probably starting
# wait after a failed probe, as a share of the interval: short, because the site's streams wait for the next probe's result
DOUBT_SHARE = 0.1
PROBES_PER_S = 1000.0  # limit for all sites together, a fifth of a core: a probe takes 0.2 ms
MAX_STATUS_BYTES = 4 << 20
STATUS_PATH = "/status"

log = logging.getLogger(__name__)


class ProbeReply(NamedTuple):
    body: bytes
    http_status: int
    round_trips: int  # round trips in the elapsed time: 1 on a warm connection, more on a new one
    refusal: str = ""  # why the site refuses this router's requests


class ProbeError(Exception):
    """The site did not publish a usable status; the message has the reason."""


Fetch = Callable[[str, str], Awaitable[ProbeReply]]  # arguments: a URL, and the name of its site


class HealthMonitor:
    def __init__(
        self,
        backends: Collection[Backend],
        fetch: Fetch,
        config: HealthConfig,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`backends` is a view that may change; call `changed` after each change."""
        self._backends = backends
        self._changed = asyncio.Event()
        self._fetch = fetch
        self._config = config
        self._clock = clock
        self._sleep = sleep
        self._chance = chance

    async def run(self) -> None:
        """Probe until cancelled."""
        watches: dict[Backend, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                for gone in watches.keys() - set(self._backends):
                    watches.pop(gone).cancel()
                for i, backend in enumerate(self._backends):
                    if backend not in watches:
                        watches[backend] = group.create_task(self._watch(backend, i / PROBES_PER_S))
                await self._changed.wait()
                self._changed.clear()

    def changed(self) -> None:
        """Probe all sites of the changed `backends`."""
        self._changed.set()

    async def _watch(self, backend: Backend, begin_after_s: float = 0.0) -> None:
        # With few sites the delay is at most one interval. It is then skipped, because few sites may be probed at once.
        if begin_after_s > self._config.interval_s:
            await self._sleep(begin_after_s)
        while True:
            await self.probe(backend)
            share = DOUBT_SHARE if backend.is_in_doubt else 1.0 if backend.probed.was_healthy else STARTING_SHARE
            least_s = 0.0 if backend.is_in_doubt else len(self._backends) / PROBES_PER_S
            await self._sleep(max(least_s, self._config.interval_s * share) * (1 + JITTER * (2 * self._chance() - 1)))

    async def probe(self, backend: Backend) -> None:
        before, refused_before = backend.state, backend.probed.refuses_hops
        asked_at = self._clock()
        try:
            async with TimeLimit(self._config.timeout_s):
                known = backend.published.digests
                query = f"?digests={known}" if known else ""
                fetched = await self._fetch(backend.url + STATUS_PATH + query, backend.name)
            elapsed_ms = 1000 * (self._clock() - asked_at)
            if fetched.refusal:
                raise _HopRefused
            if fetched.http_status != 200:
                raise ProbeError(f"/status answered {fetched.http_status}")
            status = decode_status(fetched.body)
            if status.site != backend.name:
                raise ProbeError(f"the site at {backend.url} has the name {status.site!r}: correct the router's file")
            backend.round_trip.observe(elapsed_ms / fetched.round_trips)
            backend.answered(status, asked_at)
        except TimeoutError:
            backend.failed(f"/status did not answer within {self._config.timeout_s:g} s")
        except msgspec.MsgspecError as error:
            backend.failed(f"/status is malformed: {error}")
        except _HopRefused:
            backend.refused_hop(
                f"it refuses this router's signature: {HOP_SECRET_ENV} must be the same at the router and its sites, "
                f"and {backend.url} the address of {backend.name}"
            )
        except (ProbeError, aiohttp.ClientError, OSError) as error:
            backend.failed(reason_of(error))
        except Exception:
            log.exception("probing site %s failed inside the router", backend.name)
            backend.failed("the router failed to probe it; its log has the reason")
        if backend.state != before or (backend.probed.refuses_hops and not refused_before):
            level = logging.INFO if backend.state == "healthy" else logging.WARNING
            log.log(
                level,
                "site %s was %s and is %s: %s",
                backend.name,
                before,
                backend.state,
                backend.detail or "it answers",
            )


class _HopRefused(Exception):
    """The site answers probes, but refuses this router's requests."""


def status_fetch(session: aiohttp.ClientSession, secret: str = "", clocks: SiteClocks | None = None) -> Fetch:
    """Return a function that fetches a site's status.
    `session` must have `connection_trace()`, which distinguishes new connections. Probes are signed like requests, so that a site with another secret
    is found before a request is sent there; a site whose clock differs answers with its time, and the probe is repeated with that time."""
    clocks = clocks or SiteClocks(())

    async def fetch(url: str, site: str) -> ProbeReply:
        fetched, told_s = await ask(url, site)
        if told_s is None:
            return fetched
        clocks.record(site, told_s)
        again = (await ask(url, site))[0]
        return again._replace(round_trips=fetched.round_trips + again.round_trips)

    async def ask(url: str, site: str) -> tuple[ProbeReply, float | None]:
        trips = SimpleNamespace(count=1)
        headers = {REQUEST_ID: (request_id := uuid.uuid4().hex)}
        if secret:
            hop = Hop("GET", STATUS_PATH, request_id, site, url.partition("?")[2])
            headers[HOP] = sign_hop(secret, clocks.now_s(site), hop)
        no_limit = aiohttp.ClientTimeout()  # `probe` limits the time, and begins it again after a pause of this process
        async with session.get(
            url, headers=headers, allow_redirects=False, trace_request_ctx=trips, timeout=no_limit
        ) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_STATUS_BYTES:
                    raise ProbeError(f"/status is larger than {MAX_STATUS_BYTES} bytes")
            told_s = told_clock(response.headers.get(CLOCK, ""), secret, site, request_id) if secret else None
            return ProbeReply(bytes(body), response.status, trips.count, response.headers.get(REFUSAL, "")), told_s

    return fetch
