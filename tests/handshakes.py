"""The response that opened a client's WebSocket, for which aiohttp has no public name."""

from aiohttp import ClientResponse, ClientWebSocketResponse


def handshake_of(socket: ClientWebSocketResponse) -> ClientResponse:
    return socket._response
