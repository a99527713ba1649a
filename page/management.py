"""The management API of a router, or of a site without one.

The page and `pilotlight manage` change a running network with it. All paths need the scope `admin`, from a key or from the page's cookie; every
change is a line in the log `pilotlight.audit`. GET /manage/catalogue, POST /manage/sites/SITE (a SiteOperation), GET /manage/hub?site=&words=, GET
/manage/stores, GET /manage/stores/SITE (the fields of a StoreQuery), GET /manage/audit; at routers also GET and POST /manage/keys, DELETE
/manage/keys/NAME, POST /manage/join.
"""

import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pilotlight.page.bodies import read_body, respond
from pilotlight.page.sessions import Sessions
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.management import (
    Catalogue,
    FunctionStore,
    HubModel,
    HubQuery,
    SiteOperation,
    StorePage,
    StoreQuery,
)

log = logging.getLogger("pilotlight.audit")

SHOWN = 200  # number of changes in the audit list
BodyT = TypeVar("BodyT")
Joining = Callable[[float], Awaitable[str]]  # minutes of validity -> the command with which one machine joins


class KeyRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key to be made, with limits for its account if that is new."""

    name: str
    scopes: tuple[Literal["models", "deploy", "metrics", "admin"], ...] = ("models",)
    account: str | None = None  # by default an account with the key's name
    expires_days: Annotated[float, Meta(gt=0, le=36_500)] | None = None
    requests_per_min: float | None = None
    tokens_per_min: float | None = None
    tokens_per_day: int | None = None
    cost_per_day: float | None = None


class JoinLineRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    minutes: Annotated[float, Meta(ge=1, le=1440)] = 60.0


class Operator(Protocol):
    """Performs operations on sites."""

    async def catalogues(self) -> dict[str, Catalogue | str]:
        """Return each site's catalogue, or the reason why there is none."""

    async def perform(self, site: str, operation: SiteOperation) -> None:
        """Start an operation at a site. Raises ApiError."""

    async def search_hub(self, site: str, query: HubQuery) -> tuple[HubModel, ...]:
        """Search the hub from a site's machine. Raises ApiError."""

    async def stores(self) -> dict[str, tuple[FunctionStore, ...] | str]:
        """Return the stores of each site that serves functions, or the reason why they cannot be read."""

    async def read_store(self, site: str, query: StoreQuery) -> StorePage:
        """Return the content of a store at a site. Raises ApiError."""


class KeyIssuer(Protocol):
    """Makes keys that are valid at once."""

    def list_keys(self) -> list[dict[str, Any]]: ...

    async def create(self, new: KeyRequest) -> str:
        """Return the new key, which is stored nowhere. Raises ApiError."""

    async def revoke(self, name: str) -> None:
        """Revoke a key. Raises ApiError."""


class AuditLine(NamedTuple):
    at_s: float
    who: str
    what: str
    outcome: str  # "done", or the error


class ManagementRoutes:
    def __init__(
        self,
        operator: Operator,
        sessions: Sessions,
        keys: KeyIssuer | None = None,
        joining: Joining | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._operator = operator
        self._sessions = sessions
        self._keys = keys
        self._joining = joining
        self._clock = clock
        self._lines: deque[AuditLine] = deque(maxlen=SHOWN)

    def routes(self) -> list[BaseRoute]:
        of_routers = [
            Route("/manage/keys", self.list_keys),
            Route("/manage/keys", self.create_key, methods=["POST"]),
            Route("/manage/keys/{name}", self.revoke_key, methods=["DELETE"]),
            Route("/manage/join", self.join_line, methods=["POST"]),
        ]
        return [
            Route("/manage/catalogue", self.catalogue),
            Route("/manage/sites/{site}", self.operate, methods=["POST"]),
            Route("/manage/hub", self.search_hub),
            Route("/manage/stores", self.stores),
            Route("/manage/stores/{site}", self.read_store),
            Route("/manage/audit", self.audit),
            *(of_routers if self._keys is not None else ()),
        ]

    async def catalogue(self, request: Request) -> Response:
        self._sessions.visitor(request, "admin")
        return respond(_read_and_unread(await self._operator.catalogues()))

    async def operate(self, request: Request) -> Response:
        """Start an operation at a site. Its progress is in the catalogue and in the page's feed."""
        who = self._sessions.actor(request).name
        operation, site = await _read(request, SiteOperation), request.path_params["site"]
        subject = " ".join(word for word in (operation.source, operation.model) if word)
        async with self._audited(who, f"{operation.action} {subject} at {site}".replace("  ", " ")):
            await self._operator.perform(site, operation)
        return respond({"started": True}, 202)

    async def search_hub(self, request: Request) -> Response:
        """Return the hub's models that match some words, the most downloaded first."""
        self._sessions.visitor(request, "admin")
        query = dict(request.query_params)
        site = query.pop("site", "")
        return respond({"models": await self._operator.search_hub(site, _converted(query, HubQuery))})

    async def stores(self, request: Request) -> Response:
        self._sessions.visitor(request, "admin")
        return respond(_read_and_unread(await self._operator.stores()))

    async def read_store(self, request: Request) -> Response:
        """Return a page of a database's table, or of the keys in a namespace."""
        self._sessions.visitor(request, "admin")
        query = _converted(dict(request.query_params), StoreQuery)
        return respond(await self._operator.read_store(request.path_params["site"], query))

    async def join_line(self, request: Request) -> Response:
        """Return a command with which one more machine joins the network. It works once."""
        who, wish = self._sessions.actor(request).name, await _read(request, JoinLineRequest)
        if self._joining is None:
            sentence = "no machine may join this network: [join] of the router's file names no directory; `pilotlight network init` makes one"
            raise ApiError("not_found", sentence)
        async with self._audited(who, f"let one machine join within {wish.minutes:g} minutes"):
            line = await self._joining(wish.minutes)
        return respond({"line": line}, 201)

    async def audit(self, request: Request) -> Response:
        """Return the newest changes, the oldest first."""
        self._sessions.visitor(request, "admin")
        return respond({"changes": [line._asdict() for line in self._lines]})

    async def list_keys(self, request: Request) -> Response:
        self._sessions.visitor(request, "admin")
        assert self._keys is not None
        return respond({"keys": self._keys.list_keys()})

    async def create_key(self, request: Request) -> Response:
        """Return a new key. It cannot be shown again."""
        who, new = self._sessions.actor(request).name, await _read(request, KeyRequest)
        assert self._keys is not None
        async with self._audited(who, f"create the key {new.name} with {', '.join(new.scopes)}"):
            key = await self._keys.create(new)
        return respond({"name": new.name, "key": key}, 201)

    async def revoke_key(self, request: Request) -> Response:
        who, name = self._sessions.actor(request).name, request.path_params["name"]
        assert self._keys is not None
        async with self._audited(who, f"revoke the key {name}"):
            await self._keys.revoke(name)
        return respond({"revoked": name})

    @asynccontextmanager
    async def _audited(self, who: str, what: str) -> AsyncIterator[None]:
        """Open a scope for a change, and write an audit line with its result."""
        outcome = "done"
        try:
            yield
        except ApiError as error:
            outcome = error.message
            raise
        except BaseException as error:
            outcome = repr(error)
            raise
        finally:
            line = AuditLine(self._clock(), who, _plain(what), _plain(outcome))
            self._lines.append(line)
            log.info("%s: %s: %s", line.who, line.what, line.outcome)


async def _read(request: Request, kind: type[BodyT]) -> BodyT:
    """Return the request's decoded body. Raises ApiError."""
    try:
        return msgspec.json.decode(await read_body(request), type=kind)
    except msgspec.MsgspecError as error:
        raise ApiError("invalid_request", f"the body has an invalid form: {error}") from None


def _converted(query: dict[str, str], kind: type[BodyT]) -> BodyT:
    """Return the decoded query. Raises ApiError."""
    try:
        return msgspec.convert(query, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError("invalid_request", f"the query has an invalid form: {error}") from None


def _read_and_unread(found: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """Separate the answers of sites from the reasons why other sites gave none."""
    return {
        "sites": {site: one for site, one in found.items() if not isinstance(one, str)},
        "unread": {site: one for site, one in found.items() if isinstance(one, str)},
    }


def _plain(text: str) -> str:
    """Return a client's text as one printable line for a log."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:300]
