"""The limits that an HTTP/1.1 server holds its clients to."""

from typing import NamedTuple


class HttpLimits(NamedTuple):
    max_head_bytes: int = 64 << 10
    max_headers: int = 128
    head_timeout_s: float = 15.0  # from its first byte, and from the connection's start to the first
    keep_alive_s: float = 75.0  # longer than any pool keeps an idle connection: the client closes first
    stall_s: float = 60.0  # time for a client to read, once its buffer is full
    write_buffer_bytes: int = 64 << 10  # above it the application waits; in addition to the kernel's buffer
    max_message_bytes: int = 32 << 20  # of a WebSocket
    max_unread_bytes: int = 256 << 20  # of all answers that wait for their clients; of one address a quarter
    max_connections: int = 20_000
    max_connections_per_client: int = 20_000  # by address
    sweep_s: float = 0.5  # between two looks at all connections
    given_back_bytes: int = (
        4 << 20
    )  # freed memory goes back to the system once that much was unread and three quarters of it are gone
