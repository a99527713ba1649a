"""HTTP sessions for probes and control requests to sites."""

import ssl
from types import SimpleNamespace

import aiohttp

from pilotlight.sites.network import RelayConfig
from pilotlight.wire.http.client import KEEP_ALIVE_S, connect_reason


def connection_trace() -> aiohttp.TraceConfig:
    """Return a trace that counts the round trip of a TCP handshake.
    A TLS handshake takes one more, which is not counted: only the first probe on a new connection is wrong, and later ones correct it."""
    trace = aiohttp.TraceConfig()

    async def on_create_end(session: object, context: SimpleNamespace, params: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.count += 1

    trace.on_connection_create_end.append(on_create_end)
    return trace


def connector(tls: ssl.SSLContext | None = None) -> aiohttp.TCPConnector:
    return aiohttp.TCPConnector(ssl=tls or True, limit=0, keepalive_timeout=KEEP_ALIVE_S, ttl_dns_cache=60)


def client_session(
    tcp: aiohttp.BaseConnector, relay: RelayConfig, *traces: aiohttp.TraceConfig
) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=tcp,
        connector_owner=False,
        auto_decompress=False,  # the client decodes the response
        skip_auto_headers=("user-agent", "accept", "content-type"),
        cookie_jar=aiohttp.DummyCookieJar(),  # cookies of sites are not kept
        # the default total timeout of 300 s would cut streams
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=relay.connect_timeout_s),
        trace_configs=list(traces),
    )


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure.
    For a failed connection aiohttp's own message begins with its TLS setting."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {connect_reason(error.os_error)}"
    return str(error) or type(error).__name__
