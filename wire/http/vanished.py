"""Whether a client has vanished, by what the kernel knows of its connection: a program hears nothing while the kernel's buffers take its bytes.

Linux's struct tcp_info (include/uapi/linux/tcp.h): eight bytes of small fields, then numbers of 32 bits. Elsewhere nobody is known to have vanished.
"""

import socket
import struct
import sys
from asyncio.trsock import TransportSocket

# Sent and not acknowledged for so long, the client is gone: one that merely does not read still acknowledges, and a network that loses a third of all
# packets has brought one through by then.
SILENT_MS = 15_000

_UNACKED, _LAST_ACK_RECV, _SIZE = 24, 56, 60
_UINT = struct.Struct("=I")


def has_vanished(sock: "socket.socket | TransportSocket | None") -> bool:
    if sock is None or sys.platform != "linux":
        return False
    try:
        return is_silent(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SIZE))
    except OSError:  # it is no TCP connection, or one that has ended
        return False


def is_silent(tcp_info: bytes) -> bool:
    if len(tcp_info) < _SIZE:
        return False
    (unacked,), (last_ack_ms,) = _UINT.unpack_from(tcp_info, _UNACKED), _UINT.unpack_from(tcp_info, _LAST_ACK_RECV)
    return bool(unacked and last_ack_ms > SILENT_MS)
