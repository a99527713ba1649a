"""Reasons of connections that fail, as the router's status and log have them."""

import socket
import ssl

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from pilotlight.edge_router.backends.site_sessions import reason_of

KEY = ConnectionKey("ams1.example", 8791, True, True, None, None, None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionRefusedError(111, "any"), "Connection refused"),
        (ssl.SSLCertVerificationError(1, "certificate verify failed: expired"), "certificate verify failed: expired"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
        (OSError("Multiple exceptions: [Errno 111] ..."), "none of its addresses accepts a connection"),
    ],
)
def test_a_failed_connection_has_the_reason_of_its_cause(error: OSError, reason: str) -> None:
    assert reason_of(aiohttp.ClientConnectorError(KEY, error)) == f"cannot connect: {reason}"


def test_another_failure_has_its_own_words() -> None:
    assert reason_of(aiohttp.ServerDisconnectedError()) == "Server disconnected"
    assert reason_of(TimeoutError()) == "TimeoutError"
