"""Operations on the sites of a network, through its router.

The router forwards them to the site; a drain changes only where this router sends requests.
"""

import asyncio
from collections.abc import Mapping

import msgspec

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.site_control import SiteControl
from pilotlight.wire.errors import ApiError, message_of
from pilotlight.wire.hop.management import CATALOGUE_PATH, OPERATION_PATH, Catalogue, SiteOperation

CATALOGUE_TIMEOUT_S = 20.0  # a site reads the descriptions of new files first
OPERATION_TIMEOUT_S = 30.0  # a model's weights may have to leave the device
MAX_CATALOGUE = 4 << 20


class SiteOperations:
    """Raises ApiError, with the site's own reason if it has one."""

    def __init__(self, backends: Mapping[str, Backend], orders: SiteControl) -> None:
        self._backends = backends
        self._orders = orders

    async def catalogues(self) -> dict[str, Catalogue | str]:
        """Return the catalogue of each site that is not known to be down, or why there is none."""
        down = {name: each.detail or each.state for name, each in self._backends.items() if each.state == "unhealthy"}
        asked = [name for name in self._backends if name not in down]
        return {**dict(zip(asked, await asyncio.gather(*map(self._catalogue, asked)), strict=True)), **down}

    async def perform(self, site: str, operation: SiteOperation) -> None:
        backend = self._backend(site)
        if operation.action in ("drain", "resume"):
            backend.cordon(operation.action == "drain")
            return
        body = msgspec.json.encode(operation)
        answer = await self._orders.exchange("POST", site, OPERATION_PATH, body, timeout_s=OPERATION_TIMEOUT_S)
        if answer.status == 0 or answer.status >= 300:
            word = (
                "upstream_timeout" if not answer.status else "conflict" if answer.status == 409 else "invalid_request"
            )
            raise ApiError(word, f"{site}: {message_of(answer.body)}")

    async def timeline(self, site: str) -> bytes:
        """Return the site's /timeline."""
        answer = await self._orders.exchange("GET", self._backend(site).name, "/timeline")
        if answer.status != 200:
            raise ApiError("upstream_timeout", f"{site}: {message_of(answer.body)}")
        return answer.body

    async def _catalogue(self, site: str) -> Catalogue | str:
        options = {"timeout_s": CATALOGUE_TIMEOUT_S, "most_bytes": MAX_CATALOGUE}
        answer = await self._orders.exchange("GET", site, CATALOGUE_PATH, **options)  # type: ignore[arg-type]
        if answer.status != 200:
            return message_of(answer.body)
        try:
            return msgspec.json.decode(answer.body, type=Catalogue)
        except msgspec.DecodeError as error:
            return f"its catalogue cannot be read: {error}"

    def _backend(self, site: str) -> Backend:
        if (backend := self._backends.get(site)) is None:
            raise ApiError("not_found", f"this network has no site named {site[:200]!r}")
        return backend
