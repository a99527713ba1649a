"""Operations on the sites of a network, through its router.

The router forwards them to the site; a drain changes only where this router sends requests.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.edge_router.backends.site_control import SiteControl
from pilotlight.wire.errors import ApiError, message_of
from pilotlight.wire.hop.management import (
    CATALOGUE_PATH,
    HUB_PATH,
    OPERATION_PATH,
    STORES_PATH,
    Catalogue,
    FunctionStore,
    HubModel,
    HubQuery,
    SiteOperation,
    StorePage,
    StoreQuery,
)

CATALOGUE_TIMEOUT_S = 20.0  # time for a site's list of models: it reads the descriptions of new files first
OPERATION_TIMEOUT_S = 30.0  # time for an operation: another model's weights may have to leave the device first
HUB_TIMEOUT_S = 25.0  # time for a search at the hub, for which a site waits at most 20 s
STORE_TIMEOUT_S = 5.0
MAX_ANSWER = 4 << 20

# The error for a site's status; status 0 means that there was no answer.
REFUSALS = {0: "upstream_timeout", 404: "not_found", 409: "conflict", 503: "overloaded"}
AnswerT = TypeVar("AnswerT")


class SiteOperations:
    """Requests for operations at sites. Methods raise ApiError, with the site's reason if it has one."""

    def __init__(
        self, backends: Mapping[str, Backend], orders: SiteControl, set_drained: Callable[[str, bool], Awaitable[None]]
    ) -> None:
        """`set_drained` starts or ends the drain of a site by its name."""
        self._backends = backends
        self._orders = orders
        self._set_drained = set_drained

    async def catalogues(self) -> dict[str, Catalogue | str]:
        """Return the catalogue of each site; for a site that is down or fails, the reason."""
        down = {name: each.detail or each.state for name, each in self._backends.items() if each.state == "unhealthy"}
        asked = [name for name in self._backends if name not in down]
        return await self._listed(asked, CATALOGUE_PATH, CATALOGUE_TIMEOUT_S, Catalogue) | down

    async def perform(self, site: str, operation: SiteOperation) -> None:
        backend = self._backend(site)
        if operation.action in ("drain", "resume"):
            return await self._set_drained(backend.name, operation.action == "drain")
        await self._answer(site, OPERATION_PATH, operation, OPERATION_TIMEOUT_S)

    async def search_hub(self, site: str, query: HubQuery) -> tuple[HubModel, ...]:
        body = await self._answer(self._backend(site).name, HUB_PATH, query, HUB_TIMEOUT_S)
        return _decoded(body, tuple[HubModel, ...])

    async def stores(self) -> dict[str, tuple[FunctionStore, ...] | str]:
        """Return the stores of each healthy site that serves functions; for a site that fails, the reason."""
        serving = [name for name, each in self._backends.items() if each.state == "healthy" and _has_functions(each)]
        return await self._listed(serving, STORES_PATH, STORE_TIMEOUT_S, tuple[FunctionStore, ...])

    async def read_store(self, site: str, query: StoreQuery) -> StorePage:
        body = await self._answer(self._backend(site).name, STORES_PATH, query, STORE_TIMEOUT_S)
        return _decoded(body, StorePage)

    async def timeline(self, site: str) -> bytes:
        """Return the site's /timeline."""
        answer = await self._orders.exchange("GET", self._backend(site).name, "/timeline")
        if answer.status != 200:
            raise ApiError("upstream_timeout", f"{site}: {message_of(answer.body)}")
        return answer.body

    async def _listed(
        self, sites: list[str], path: str, timeout_s: float, kind: type[AnswerT]
    ) -> dict[str, AnswerT | str]:
        """Return the list of each site, or the reason if it does not send one."""

        async def listed(site: str) -> AnswerT | str:
            answer = await self._orders.exchange("GET", site, path, timeout_s=timeout_s, most_bytes=MAX_ANSWER)
            if answer.status != 200:
                return message_of(answer.body)
            try:
                return _decoded(answer.body, kind)
            except ApiError as error:
                return error.message

        return dict(zip(sites, await asyncio.gather(*map(listed, sites)), strict=True))

    async def _answer(self, site: str, path: str, asked: msgspec.Struct, timeout_s: float) -> bytes:
        """Send a message to a site. Raises ApiError with the site's reason."""
        body, limits = msgspec.json.encode(asked), {"timeout_s": timeout_s, "most_bytes": MAX_ANSWER}
        answer = await self._orders.exchange("POST", site, path, body, **limits)  # type: ignore[arg-type]
        if 200 <= answer.status < 300:
            return answer.body
        raise ApiError(REFUSALS.get(answer.status, "invalid_request"), f"{site}: {message_of(answer.body)}")

    def _backend(self, site: str) -> Backend:
        if (backend := self._backends.get(site)) is None:
            raise ApiError("not_found", f"this network has no site named {site[:200]!r}")
        return backend


def _has_functions(backend: Backend) -> bool:
    return backend.status is not None and backend.status.functions is not None


def _decoded(body: bytes, kind: type[AnswerT]) -> AnswerT:
    """Decode an answer. Raises ApiError if it has another form, as from a site with an older version."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ApiError("upstream_timeout", f"its answer cannot be read: {error}") from None
