"""The functions of one site, as the site uses them: a context in which they run, routes, and a status.

The constructor's parameters are all that functions need from the site.
"""

import fcntl
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pilotlight.functions.host.pool import FunctionPool
from pilotlight.functions.host.site_functions import Trace
from pilotlight.functions.inference import Inference
from pilotlight.functions.routes.deployments import FunctionDeploymentRoutes, events_of, kept_invocations
from pilotlight.functions.routes.invocations import AdmissionGate, FunctionRoute, at_path
from pilotlight.functions.routes.stores import StoreRoutes
from pilotlight.functions.served import ServedFunctions
from pilotlight.functions.state_dir import state_dir_of
from pilotlight.runtime.api.connection import json_response, read_json
from pilotlight.runtime.api.middleware import GENUINE_HOP
from pilotlight.sites.config import ConfigError, state_directory
from pilotlight.sites.site import SiteConfig
from pilotlight.support import atomic_files
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.function_logs import FoundLogs, LogQuery
from pilotlight.wire.hop.status import FunctionsStatus, FunctionStatus
from pilotlight.wire.hop.usage_records import USAGE_PATH, UsageAsked

MAX_BODY = 256 << 10

log = logging.getLogger("pilotlight.function")


class FunctionsService:
    """The functions of one site, as an async context manager.
    `admission` gives each request its permit, so functions drain together with the site."""

    def __init__(
        self,
        config: SiteConfig,
        inference: Inference,
        admission: AdmissionGate,
        own_ports: Callable[[], list[int]],
        hop_secret: str | None,
        trace: Trace | None = None,
    ) -> None:
        """`trace` opens the tracing scope of an invocation. Raises ManifestError."""
        state_dir = state_dir_of(config)
        self.served = ServedFunctions(
            config.functions, state_dir, inference, own_ports, config.name, trace, config.hop.authority
        )
        self.stores = StoreRoutes(state_dir)
        self._admission = admission
        self._site = config.name
        self._named_state = state_directory(config.name) if config.functions.state_dir is None else None
        self._address = f"{config.listen.host}:{config.listen.port}"
        self._stack = AsyncExitStack()
        self._hop_secret = hop_secret

    async def __aenter__(self) -> "FunctionsService":
        """Lock the state directory and start to serve. Raises ConfigError."""
        async with AsyncExitStack() as stack:
            if self._named_state is not None:
                stack.enter_context(alone_in(self._named_state, self._site))
                _note_address(self._named_state / "address", self._address)
            await stack.enter_async_context(self.served)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def routes(self) -> list[BaseRoute]:
        """Return the routes of the clients' requests, of deployments, of stores and of usage."""
        served, show_errors = self.served, self.served.config.show_errors
        route = FunctionRoute(served.functions, served.version_of, self._admission, show_errors=show_errors)
        return [
            *at_path(route, "/fn/{name:function}{path:rest}"),
            *FunctionDeploymentRoutes(served, self._hop_secret, self._site).routes(),
            *self.stores.routes(),
            Route(USAGE_PATH, self.usage, methods=["POST"]),
        ]

    async def usage(self, request: Request) -> Response:
        """Report the usage of functions to a router's ledger. Raises ApiError."""
        if not request.scope.get(GENUINE_HOP, False) or self.served.usage is None:
            raise ApiError(
                "forbidden", "usage of functions is reported only to routers that share a secret with this site"
            )
        asked = await read_json(request, UsageAsked, MAX_BODY, "the body is not a valid request of a router")
        return json_response(msgspec.json.encode(self.served.usage.hand_out(asked)))

    def versions(self, *, is_admin: bool) -> bytes:
        """Return an empty JSON list: a site without a router has no versions of functions."""
        return b"[]"

    async def invocations(self, name: str, asked: QueryParams) -> bytes:
        """Return a function's logged invocations as JSON. Raises ApiError."""
        fields = {
            "function": name,
            **{key: asked[key] for key in ("since_s", "grep", "status", "limit") if key in asked},
        }
        try:
            query = msgspec.convert(fields, LogQuery, strict=False)
        except msgspec.ValidationError as error:
            raise ApiError("invalid_request", f"invalid log query: {error}") from None
        return msgspec.json.encode(FoundLogs(await kept_invocations(self.served, query, self._site), {}, {}))

    def lines(self, name: str) -> AsyncGenerator[bytes, None]:
        """Yield a function's output from now on as server-sent events. Raises ApiError."""
        if name not in self.served.functions.pools:
            raise ApiError("not_found", f"this site has no function {name[:64]!r}")
        return events_of(self.served.functions.tails, name, self._site)

    def status(self) -> FunctionsStatus:
        isolation, pools = self.served.functions.isolation, self.served.functions.pools
        states = tuple(_state(name, pool) for name, pool in sorted(pools.items()))
        takes_deployed = self.served.config.deployments is not None
        return FunctionsStatus(isolation.tier, isolation.why_not_more, states, takes_deployed)


def _state(name: str, pool: FunctionPool) -> FunctionStatus:
    isolates, asked, failed = pool.isolates, pool.num_asked, pool.num_failed
    return FunctionStatus(
        name, len(isolates.living), isolates.load, isolates.num_started, isolates.sockets, asked, failed
    )


@contextmanager
def alone_in(state: Path, site: str) -> Iterator[None]:
    """Lock a directory, so that no other site of this name uses it.
    The same user may run a second network on this machine. Raises ConfigError."""
    state.mkdir(parents=True, exist_ok=True)
    directory = os.open(state, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sentence = f"another site named {site!r} keeps the data of its functions in {state}: set functions.state_dir in this site's file"
            raise ConfigError(sentence) from None
        yield
    finally:
        os.close(directory)


def _note_address(file: Path, address: str) -> None:
    """Warn if the site that used this state before had another address: it may belong to another network."""
    before = file.read_text() if file.is_file() else address
    if before != address:
        log.warning(
            "%s has the state of a site at %s, but this site is at %s: if it belongs to another network, set functions.state_dir in this file",
            file.parent, before, address,
        )  # fmt: skip
    atomic_files.write(file, address.encode())
