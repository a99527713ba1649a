"""Egress: the outgoing requests of functions, and the addresses that they may not reach.

Private, loopback and link-local addresses and the runtime's own ports are denied, however they are spelt: the resolved address is checked, again at
each redirect, and the connection goes to exactly that address. The site file allows exceptions by host and port.
"""

import asyncio
import fnmatch
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.streams import Inbound
from pilotlight.functions.host.network.egress_sockets import opened
from pilotlight.functions.host.subrequests import Dial
from pilotlight.support.time_limits import TimeLimit

MAX_REDIRECTS = 20
REDIRECTS = frozenset({301, 302, 303, 307, 308})
CONNECT_S = 10.0
TOTAL_S = 300.0
CLOSED_PORTS = frozenset({25})  # SMTP: mail sent by a function would seem to come from the site
SOCKET_BUFFER_BYTES = 64 << 10  # per direction of a connection that a function holds; the kernel doubles it
DROPPED = frozenset(
    {
        "host",
        "content-length",
        "connection",
        "transfer-encoding",
        "upgrade",
        "keep-alive",
        "te",
        "trailer",
        "proxy-authorization",
    }
)
OF_BODIES = (
    "content-encoding",
    "content-language",
    "content-location",
    "content-type",
)  # headers dropped together with the body
NAT64 = ipaddress.ip_network("64:ff9b::/96")
# All publicly allocated IPv6 addresses. Site-local, ::a.b.c.d, local NAT64 and SRv6 addresses are outside.
UNICAST = ipaddress.ip_network("2000::/3")
NOT_PUBLIC = tuple(  # addresses that some versions of Python take for global
    ipaddress.ip_network(text)
    for text in ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "3fff::/20")  # the first is Azure's wire server
)


class Egress:
    """Makes the outgoing requests of functions; an async context manager."""

    def __init__(
        self,
        allowed: Collection[str] = (),
        own_ports: Callable[[], Collection[int]] = lambda: (),
        is_own: Callable[[str], bool] | None = None,
    ) -> None:
        """`is_own` tells whether an address is this machine's."""
        self._allowed = tuple(allowed)
        self._own_ports = own_ports
        self._is_own = is_own or is_of_this_machine
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Egress":
        connector = aiohttp.TCPConnector(resolver=_JudgingResolver(self), use_dns_cache=False, limit=0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=TOTAL_S, sock_connect=CONNECT_S),
            skip_auto_headers=("user-agent", "accept", "content-type"),
            middlewares=(self._judged,),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, frame: frames.FetchEvent, body: Inbound | None) -> StreamingReply:
        """Send a function's HTTP request. Raises Failure if it is denied or fails."""
        assert self._session is not None
        method, url, redirected = frame.method, frame.url, False
        headers = [(name, value) for name, value in frame.headers if name.lower() not in DROPPED]
        if frame.options.get("websocket") and body is not None:
            return await self._socket(url, headers, body)
        data: Any = body if body is not None else (frame.body or None)
        for _ in range(MAX_REDIRECTS + 1):
            self.check_url(url)
            try:
                response = await self._session.request(
                    method, URL(url, encoded=True), headers=headers, data=data, allow_redirects=False
                )
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                raise _failed(url, error) from None
            location = response.headers.get("location")
            if response.status not in REDIRECTS or location is None or frame.options.get("redirect") == "manual":
                return reply_of(response, redirected)
            response.release()
            if frame.options.get("redirect") == "error":
                raise Failure(f"fetch of {url} was redirected", code="redirected", status=502, name="TypeError")
            becomes_get = (response.status == 303 and method != "HEAD") or (
                response.status in (301, 302) and method == "POST"
            )
            if body is not None and data is body and not becomes_get:
                raise Failure("a streamed body cannot be sent again after a redirect", code="redirected", status=502)
            before, url, redirected = url, _target(url, location), True
            if urlsplit(url)[:2] != urlsplit(before)[:2]:
                headers = [pair for pair in headers if pair[0].lower() not in ("authorization", "cookie")]
            if becomes_get:
                method, data = "GET", None
                headers = [pair for pair in headers if pair[0].lower() not in OF_BODIES]
        raise Failure(f"fetch gave up after {MAX_REDIRECTS} redirects", code="redirected", status=502, name="TypeError")

    async def _socket(self, url: str, headers: list[tuple[str, str]], messages: Inbound) -> StreamingReply:
        """Open a WebSocket for a function.
        A refused handshake is returned as its HTTP response. As in browsers, redirects are not followed."""
        assert self._session is not None
        plain = url.replace("ws", "http", 1) if url.startswith(("ws://", "wss://")) else url
        self.check_url(plain)
        try:
            return await opened(self._session, plain, headers, messages)
        except aiohttp.WSServerHandshakeError as error:
            refused = [(name.lower(), value) for name, value in (error.headers or {}).items()]
            return StreamingReply({"status": error.status, "headers": refused, "body": b"", "url": url})
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise _failed(url, error) from None

    async def _judged(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        """Middleware of the session: check the host of each request as the client parsed it.
        The client would follow redirects of a WebSocket handshake; they end here."""
        self._check_place(request.url.host or "", request.url.port or 0)
        response = await handler(request)
        if "sec-websocket-key" in request.headers and response.status in REDIRECTS:
            response.release()
            raise aiohttp.WSServerHandshakeError(
                response.request_info, (), status=response.status, headers=response.headers
            )
        return response

    async def dial(self, wanted: Dial) -> socket.socket | list[str]:
        """Return a TCP connection for a function or, without `connects`, the addresses of a name.
        Raises Failure and OSError."""
        if not 0 < wanted.port < 65536 and wanted.connects:
            raise Failure(f"there is no port {wanted.port}", code="bad_url", status=400)
        if wanted.port in CLOSED_PORTS:
            raise _refusal(f"the port {wanted.port} is closed to functions")
        self._check_place(wanted.host, wanted.port)
        try:
            found = await _JudgingResolver(self).resolve(wanted.host, wanted.port)
        except _Denied as denied:
            raise _refusal(str(denied)) from None
        if not wanted.connects:
            return list(dict.fromkeys(each["host"] for each in found))
        async with TimeLimit(CONNECT_S):
            return await connect_first(found)

    def check_url(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise _no_url(url) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Failure(
                f"fetch takes http and https URLs, not {url[:200]!r}", code="bad_url", status=400, name="TypeError"
            )
        self._check_place(parts.hostname, port)

    def _check_place(self, host: str, port: int) -> None:
        """Check an address literal in a URL, because the resolver never sees it. Raises Failure."""
        address = _as_address(host)
        if address is not None and (why := self.why_denied(host, str(address), port)):
            raise _refusal(why)

    def why_denied(self, host: str, address: str, port: int) -> str:
        """Return why an address is denied; empty if it is allowed."""
        for pattern in self._allowed:
            name, _, number = pattern.rpartition(":") if pattern.rpartition(":")[2].isdigit() else (pattern, "", "")
            if fnmatch.fnmatch(host.lower(), name.lower()) and number in ("", str(port)):
                return ""
        end = meant(address)
        if self._is_own(str(end)):
            whose = "this site's own" if port in self._own_ports() else "on the site's own machine"
            return f"{host}:{port} is {whose}; reach models and functions through bindings"
        if not is_public(end):
            sentence = f"{host} is at {address}, which is not a public address; exceptions are named by functions.egress_allow of the site file"
            return f"{sentence}, or `pilotlight dev --egress-allow`"
        return ""


async def connect_first(found: list[ResolveResult]) -> socket.socket:
    """Return a connection to the first address that accepts one. Raises OSError."""
    failed: OSError = OSError("the host name has no address")
    for each in found:
        connection = socket.socket(each["family"], socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().sock_connect(connection, (each["host"], each["port"]))
            return connection
        except OSError as error:
            failed = error
            connection.close()
        except BaseException:
            connection.close()
            raise
    raise failed


class _Denied(OSError):
    pass


class _JudgingResolver(AbstractResolver):
    def __init__(self, egress: Egress) -> None:
        self._egress = egress

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        found: list[ResolveResult] = []
        for kind, _, proto, _, place in infos:
            address = str(place[0])
            if why := self._egress.why_denied(host, address, port):
                raise _Denied(why)
            found.append(
                ResolveResult(
                    hostname=host, host=address, port=port, family=kind, proto=proto, flags=socket.AI_NUMERICHOST
                )
            )
        return found

    async def close(self) -> None:
        return


def reply_of(response: aiohttp.ClientResponse, redirected: bool) -> StreamingReply:
    compressed = "content-encoding" in response.headers  # aiohttp decodes the body
    drop = {"content-encoding", "content-length", "transfer-encoding"} if compressed else {"transfer-encoding"}
    headers = [[name.lower(), value] for name, value in response.headers.items() if name.lower() not in drop]
    value = {"status": response.status, "headers": headers, "url": str(response.url), "redirected": redirected}
    return StreamingReply(value, _body(response))


async def _body(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.content.iter_any():
            yield chunk
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Failure(f"the answer of {response.url} broke off: {error}", code="fetch_failed", status=502) from None
    finally:
        response.close()


def _failed(url: str, error: Exception) -> Failure:
    denied = error if isinstance(error, _Denied) else error.__cause__
    if isinstance(denied, _Denied):
        return _refusal(str(denied))
    reason = str(error) or type(error).__name__
    return Failure(f"fetch of {url} failed: {reason}", code="fetch_failed", status=502, name="TypeError")


def _target(url: str, location: str) -> str:
    """Return the target of a redirect. Raises Failure."""
    try:
        return urljoin(url, location)
    except ValueError:
        raise _no_url(location) from None


def _no_url(text: str) -> Failure:
    return Failure(f"{text[:200]!r} is no URL", code="bad_url", status=400, name="TypeError")


def _refusal(why: str) -> Failure:
    return Failure(f"fetch is not allowed there: {why}", code="egress_denied", status=403, name="TypeError")


def _as_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Parse an address literal, including old spellings that the C library accepts (127.1, 0x7f000001)."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, UnicodeEncodeError):
        return None


def meant(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that is finally reached: the IPv4 address embedded in an IPv6 one, if any."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address not in UNICAST:
        return False
    is_special = any(address in network for network in NOT_PUBLIC if network.version == address.version)
    return address.is_global and not address.is_multicast and not is_special


def is_of_this_machine(address: str) -> bool:
    """Tell whether an address is one of this machine's own.
    Connecting a UDP socket sends nothing, and for an own address the kernel chooses the same address as the local end. An address that a NAT
    elsewhere maps back to this machine is not recognised."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return False
        return bool(probe.getsockname()[0] == address)
