"""Sends each router only the changes of the site's prefix digests since the last edition it has.

Complete digests take 44 kB per status and model."""

import os
from collections import OrderedDict

from msgspec.structs import replace

from pilotlight.wire.hop.prefixes import changed_prefixes
from pilotlight.wire.hop.status import SiteStatus

KEPT = 4  # number of editions kept; one is made every ten seconds, and routers ask once a second


class DigestEditions:
    def __init__(self) -> None:
        self._newest = int.from_bytes(os.urandom(6))  # random, so that editions of a restarted site differ
        self._by_edition: OrderedDict[int, dict[str, bytes]] = OrderedDict()

    def publish(self, status: SiteStatus, known: int) -> SiteStatus:
        """Return the status with the edition of its digests.
        If the edition `known` is still kept, the status has only the changes since then."""
        digests = {model.name: model.prefixes for model in status.models}
        if digests != self._by_edition.get(self._newest):
            self._newest += 1
            self._by_edition[self._newest] = digests
            if len(self._by_edition) > KEPT:
                self._by_edition.popitem(last=False)
        before = self._by_edition.get(known)
        if before is None:
            return replace(status, digests=self._newest)
        models = []
        for model in status.models:
            came, gone = changed_prefixes(before.get(model.name, b""), model.prefixes)
            models.append(replace(model, prefixes=came, prefixes_dropped=gone))
        return replace(status, models=tuple(models), digests=self._newest, digests_since=known)
