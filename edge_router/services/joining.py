"""Routes with which a machine joins as a site.

It sends a token, and gets a certificate, the network's secret and an entry in the router's file.

A token is valid once. The site is first written to the router's file, which the router then reads again.
"""

import asyncio
import logging
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.joining.network_file import add_site
from pilotlight.sites.joining.tokens import TokenError, Tokens, join_line
from pilotlight.sites.network import NetworkConfig, SiteRef, load_network
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from pilotlight.wire.hop.joining import AUTHORITY_PATH, JOIN_PATH, Joined, JoinRequest, NetworkFace
from pilotlight.wire.hop.status import Place
from pilotlight.wire.http.asgi import read_body

if TYPE_CHECKING:
    from pilotlight.sites.joining.authority import Authority

MAX_BODY = 64 << 10
JSON = "application/json"

log = logging.getLogger("pilotlight.joining")


class _Network(NamedTuple):
    folder: Path
    file: Path
    authority: "Authority"
    tokens: Tokens


class JoinRoutes:
    def __init__(
        self,
        config: NetworkConfig,
        secret: str,
        file: Path | None,
        sites: Container[str],
        apply: Callable[[NetworkConfig], None],
    ) -> None:
        """Open the folder of `file`, the router's configuration; `apply` puts its changes into effect.

        Raises ConfigError if the folder cannot be used.
        """
        self._config, self._secret = config, secret
        self._sites, self._apply = sites, apply
        self._joining = asyncio.Lock()
        self._network: _Network | None = None
        folder = config.join.directory
        if folder is not None and file is not None:
            if not secret:
                raise ConfigError(
                    f"machines that join need the network's secret: set hop.secret_file, or {HOP_SECRET_ENV}"
                )
            # Imported here, because few routers need cryptography.
            from pilotlight.sites.joining.authority import Authority, AuthorityError

            try:
                self._network = _Network(Path(folder), file, Authority(Path(folder)), Tokens(Path(folder)))
            except AuthorityError as error:
                raise ConfigError(f"join.directory: {error}") from None

    def routes(self) -> list[BaseRoute]:
        if self._network is None:
            return []
        return [Route(AUTHORITY_PATH, self.face, methods=["GET"]), Route(JOIN_PATH, self.join, methods=["POST"])]

    @property
    def is_open(self) -> bool:
        """Tell whether machines may join this network."""
        return self._network is not None

    async def line(self, minutes: float) -> str:
        """Return a command with which one machine can join, once. Raises ApiError."""
        assert self._network is not None
        folder, port, fingerprint = (
            self._network.folder,
            self._config.listen.port,
            self._network.authority.fingerprint,
        )
        try:
            return await asyncio.to_thread(join_line, folder, port, minutes, fingerprint)
        except OSError as error:
            raise ApiError("overloaded", f"{folder} cannot be used: {error.strerror}", retry_after_s=60) from None

    async def face(self, request: Request) -> Response:
        """Return the authority's certificate, which the machine checks by its token, and the location."""
        assert self._network is not None
        place = self._config.place
        told = NetworkFace(self._network.authority.pem.decode(), Place(place.city, place.latitude, place.longitude))
        return Response(msgspec.json.encode(told), media_type=JSON)

    async def join(self, request: Request) -> Response:
        """Answer a machine that joins with its certificate and the network's secret. Raises ApiError."""
        assert self._network is not None
        if request.url.scheme != "https":
            raise ApiError("forbidden", "the network's secret is sent over https only: set listen.tls_certificate")
        try:
            asked = msgspec.json.decode(await read_body(request.scope, request.receive, MAX_BODY), type=JoinRequest)
        except msgspec.MsgspecError as error:
            raise ApiError("invalid_request", f"the request to join is invalid: {error}") from None
        host = _host_of(asked.url)
        async with self._joining:
            joined = await asyncio.to_thread(self._join, self._network, asked, host)
            self._apply(load_network(self._network.file))
        log.info("site %s at %s has joined", asked.name, asked.url)
        return Response(msgspec.json.encode(joined), media_type=JSON)

    def _join(self, network: _Network, asked: JoinRequest, host: str) -> Joined:
        """Issue a certificate and add the site to the file. Raises ApiError."""
        from pilotlight.sites.joining.authority import AuthorityError

        if asked.name in self._sites:
            raise ApiError("invalid_request", f"the network has a site named {asked.name!r}: choose another --name")
        place = {"city": asked.place.city, "latitude": asked.place.latitude, "longitude": asked.place.longitude}
        try:
            load_network(network.file)  # before the token is used, because a file with an error cannot be applied
        except ConfigError as error:
            log.error("%s could not join: %s", asked.name, error)
            raise ApiError("internal_error", "the router's file has an error; the log has the reason") from None
        try:
            # first, because a file with an invalid site would stop the router's next start
            site = parse(SiteRef, {"name": asked.name, "url": asked.url, "place": place}, "the request to join")
            certificate = network.authority.issue(asked.certificate_request.encode(), host)
            admit = partial(add_site, network.file, site.name, site.url, place)
            network.tokens.redeem(asked.token, asked.name, admit)
        except TokenError as error:
            raise ApiError("unauthorized", str(error)) from None
        except (AuthorityError, ConfigError) as error:
            raise ApiError("invalid_request", str(error)) from None
        except OSError as error:
            log.error("%s could not join: %s", asked.name, error)
            sentence = "the network's folder cannot be written; the log has the reason"
            raise ApiError("overloaded", sentence, retry_after_s=60) from None
        return Joined(certificate.decode(), self._secret)


def _host_of(url: str) -> str:
    """Return the host of a site's URL. Raises ApiError for an invalid one."""
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.scheme == "https" and parts.port and parts.path in ("", "/") else None
    except ValueError:
        host = None
    if not host or not url.isascii() or set(url) & set(" \t\r\n\"'\\"):
        raise ApiError(
            "invalid_request", f"{url[:100]!r} is not an https://HOST:PORT at which this router can reach a site"
        )
    return host
