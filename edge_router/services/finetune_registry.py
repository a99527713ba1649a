"""Adapters uploaded by accounts, as this router knows them, and how sites get copies of them.

Sites store the adapters, and the router stores nothing. It asks a site for its list when the site's status shows a change, and copies each adapter to
every other site that serves the base model, also to one that was down. An adapter that was removed while a site was away is removed there when it
returns.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.site_control import SiteControl
from pilotlight.edge_router.requests.request import Head, ValidRequest, site_key
from pilotlight.edge_router.routing.data_places import DataPlaces
from pilotlight.wire.credentials import tenant_of
from pilotlight.wire.errors import message_of
from pilotlight.wire.hop.finetunes import INTERNAL_PATH, Finetune, FinetuneList

CARRY_S = 300.0  # time to copy one adapter from or to a site
LIST_BYTES = 64 << 20
CARRIED_BYTES = 1 << 30  # limit of a copy; each site has its own limit, too

log = logging.getLogger(__name__)


class FinetuneTimings(NamedTuple):
    look_every_s: float = 1.0
    try_again_s: float = 30.0  # pause after a site refused an adapter or could not get it


class SiteFinetunes:
    def __init__(
        self,
        backends: Mapping[str, Backend],
        places: DataPlaces,
        orders: SiteControl,
        timings: FinetuneTimings | None = None,
    ) -> None:
        self.orders = orders
        self._timings = timings or FinetuneTimings()
        self._backends = backends
        self._places = places
        self._told: dict[str, FinetuneList] = {}  # published lists, by site
        self._holders: dict[tuple[str, str], set[str]] = {}  # sites by (owner, name) and by (owner, id)
        self.is_empty = True  # no site has an adapter
        self._carrying = asyncio.Lock()

    def holders(self, owner: str, name: str) -> set[str]:
        """Return the sites that hold both files of an adapter of `owner`, by name or id; empty if unknown."""
        return self._holders.get((owner, name), set())

    def asked_by(self, request: ValidRequest) -> set[str]:
        """Return the sites that have the requested adapter; empty if the request names no uploaded adapter."""
        if request.model is None:
            return set()
        name = request.adapter or request.model.rpartition(":")[2]
        return self.holders(self.owner(request.head), name)

    def owner(self, head: Head) -> str:
        """Return the id under which sites store the uploads of a request's owner."""
        return tenant_of(self.key(head) if head.holder is None else head.owner, None).owner

    def key(self, head: Head) -> str:
        """Return the value that replaces a client's key at sites (`site_key`)."""
        return site_key(head, self.orders.secret if self.orders is not None else "")

    def of(self, owner: str) -> dict[str, Finetune]:
        """Return the adapters of an owner by id, the oldest first."""
        found: dict[str, Finetune] = {}
        for told in self._told.values():
            for each in told.kept:
                if each.owner == owner and not (each.id in found and found[each.id].is_whole):
                    found[each.id] = each
        return dict(sorted(found.items(), key=lambda pair: pair[1].created_s))

    def with_one(self, id: str) -> list[Backend]:
        """Return the healthy sites that have an adapter, or the first of its two files."""
        return [site for site in self.keepers() if id in self._ids(site)]

    def keepers(self) -> list[Backend]:
        """Return the healthy sites that store fine-tunes, the nearest first."""
        found = [
            each
            for each in self._backends.values()
            if each.state == "healthy" and each.status is not None and each.status.finetunes is not None
        ]
        return sorted(found, key=lambda site: site.round_trip.ms)

    def may_have(self, site: Backend, finetune: Finetune) -> bool:
        """Tell whether a site serves the adapter's base model, and may store its account's data."""
        known = site.view().model(finetune.model)
        allowed = self._places.of(finetune.account or None, finetune.model, None if known is None else known.name)
        return known is not None and (allowed is None or site.name in allowed.names)

    async def look(self) -> None:
        """Read the lists of all healthy sites."""
        await asyncio.gather(*(self._ask(site) for site in self.keepers()))

    async def run(self) -> None:
        """Copy adapters between sites until cancelled."""
        loop = asyncio.get_running_loop()
        again_at = loop.time()
        while True:
            await asyncio.sleep(self._timings.look_every_s)
            try:
                changed = [site for site in self.keepers() if self._is_news(site)]
                await asyncio.gather(*(self._ask(site) for site in changed))
                if changed or loop.time() >= again_at:
                    again_at = loop.time() + self._timings.try_again_s
                    await self._even_out()
            except Exception:
                log.exception("carrying fine-tunes between sites failed inside the router")

    async def spread(self, finetune: Finetune) -> list[str]:
        """Copy an adapter to all sites that may have it. Return which sites still lack it, and why."""
        lacking = []
        for site in tuple(self._backends.values()):
            if site.state == "healthy" and not self.may_have(site, finetune):
                continue
            if site.state != "healthy":
                lacking.append(f"{site.name} is {site.state} and will get it when it returns")
            elif site.status is None or site.status.finetunes is None:
                lacking.append(f"{site.name} accepts no fine-tunes: finetunes.directory in its file is unset")
            elif (why := await self._carry(finetune, site)) is not None:
                lacking.append(f"{site.name} does not have it: {why}")
        return lacking

    async def remove(self, finetune: Finetune) -> list[str]:
        """Remove an adapter from all sites. Return which sites still have it, and why."""
        keeping = []
        for site in tuple(self._backends.values()):
            if site.name in self._told and finetune.id in self._ids(site):
                why = await self._remove(finetune.id, site) if site.state == "healthy" else f"it is {site.state}"
                if why is not None:
                    keeping.append(f"{site.name} still has it, until it returns: {why}")
        return keeping

    async def _even_out(self) -> None:
        removed = {id for told in self._told.values() for id in told.removed}
        whole = {each.id: each for told in self._told.values() for each in told.kept if each.is_whole}
        for site in self.keepers():
            for id in self._ids(site) & removed:
                self._note(site, f"removing {id}", await self._remove(id, site))
            for id, finetune in whole.items():
                if id not in removed and id not in self._ids(site, is_whole=True) and self.may_have(site, finetune):
                    self._note(site, f"bringing {finetune.name} ({id})", await self._carry(finetune, site))

    async def _carry(self, finetune: Finetune, to: Backend) -> str | None:
        """Copy an adapter to a site. Return why the site does not have it afterwards; None on success."""
        async with self._carrying:  # one copy at a time, because each needs as much memory as its file
            if finetune.id in self._ids(to, is_whole=True):
                return None
            why = "no site that has it is reachable"
            for site in self.with_one(finetune.id):
                path = f"{INTERNAL_PATH}/{finetune.id}"
                read = await self.orders.exchange("GET", site.name, path, timeout_s=CARRY_S, most_bytes=CARRIED_BYTES)
                if read.status != 200:
                    why = f"{site.name}: {message_of(read.body)}"
                    continue
                brought = await self.orders.exchange("PUT", to.name, path, read.body, timeout_s=CARRY_S)
                why = message_of(brought.body)
                break
            await self._ask(to)
            return None if finetune.id in self._ids(to, is_whole=True) else why

    async def _remove(self, id: str, site: Backend) -> str | None:
        told = await self.orders.exchange("DELETE", site.name, f"{INTERNAL_PATH}/{id}")
        await self._ask(site)
        return None if told.status == 204 else message_of(told.body)

    async def _ask(self, site: Backend) -> None:
        told = await self.orders.exchange("GET", site.name, INTERNAL_PATH, most_bytes=LIST_BYTES)
        if told.status != 200:
            return log.warning("site %s does not list its fine-tunes: %s", site.name, message_of(told.body))
        try:
            self._told[site.name] = msgspec.json.decode(told.body, type=FinetuneList)
        except msgspec.DecodeError as error:
            return log.warning("site %s lists its fine-tunes in an unreadable form: %s", site.name, error)
        holders: dict[tuple[str, str], set[str]] = {}
        for name, listed in self._told.items():
            for each in listed.kept:
                for key in (each.id, each.name) if each.is_whole else ():
                    holders.setdefault((each.owner, key), set()).add(name)
        self._holders, self.is_empty = holders, not holders

    def _is_news(self, site: Backend) -> bool:
        known = self._told.get(site.name)
        return site.status is not None and (known is None or known.state != site.status.finetunes)

    def _ids(self, site: Backend, *, is_whole: bool = False) -> set[str]:
        known = self._told.get(site.name)
        return {each.id for each in known.kept if each.is_whole or not is_whole} if known is not None else set()

    def _note(self, site: Backend, what: str, why: str | None) -> None:
        if why is not None:
            log.warning("%s at site %s failed and will be tried again: %s", what, site.name, why)
