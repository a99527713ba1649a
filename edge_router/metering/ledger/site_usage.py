"""Usage of functions at their sites, which routers do not see: model calls and processor time.

Sites keep each record until a ledger has it, and give it to one ledger only. This module requests records, writes them, and confirms them with the
next request. So each record is in the ledger once, whichever process is killed in between.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.site_control import SiteControl
from pilotlight.edge_router.metering.ledger.accounting import Accounting
from pilotlight.edge_router.metering.ledger.ledger_store import UsageStoreError
from pilotlight.wire.hop.usage_records import USAGE_PATH, UsageAsked, UsageTold

ASK_EVERY_S = 1.0
ROUNDS = 20  # requests to one site before the next one's turn
MOST_BYTES = 16 << 20

log = logging.getLogger("pilotlight.ledger")


class SiteUsage:
    """Collects usage from all sites. Run `run()` as a task."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        orders: SiteControl,
        accounting: Accounting,
        ask_every_s: float = ASK_EVERY_S,
    ) -> None:
        assert accounting.ledger is not None, "usage is written to a ledger"
        self._backends = backends
        self._orders = orders
        self._accounting = accounting
        self._ask_every_s = ask_every_s
        self._ledger = accounting.ledger
        self._identity = ""
        # site -> records that are written but not yet confirmed to the site
        self._written: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)

    async def run(self) -> None:
        logged = ""
        while True:
            await asyncio.sleep(self._ask_every_s)
            try:
                await self.collect()
                logged = ""
            except UsageStoreError as error:
                if str(error) != logged:
                    logged = str(error)
                    log.warning("usage of functions stays at their sites until it can be written: %s", logged)
            except Exception:
                log.exception("collecting usage of functions from sites failed inside the router")

    async def collect(self) -> None:
        """Write the records of all sites. Raises UsageStoreError."""
        self._identity = self._identity or await self._ledger.identity()
        for site in tuple(self._backends.values()):
            if site.state == "healthy" and site.status is not None and site.status.functions is not None:
                for _ in range(ROUNDS):
                    if not await self._collect_from(site.name):
                        break

    async def _collect_from(self, site: str) -> bool:
        """Write a site's next records. Return whether there may be more."""
        asked = msgspec.json.encode(UsageAsked(self._identity, self._written[site]))
        answer = await self._orders.exchange("POST", site, USAGE_PATH, asked, most_bytes=MOST_BYTES)
        if answer.status != 200:
            return False
        try:
            # the site leaves out the records that are named as written
            told = msgspec.json.decode(answer.body, type=UsageTold)
        except msgspec.MsgspecError as error:
            log.warning("site %s reports usage of its functions in an unreadable form: %s", site, error)
            return False
        await self._ledger.add(told.records)
        self._accounting.count(told.records)
        self._written[site] = tuple(record.request.id for record in told.records)
        return bool(told.records)
