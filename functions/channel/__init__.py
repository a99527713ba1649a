"""Channel: many exchanges over one socket, each a request, its reply, and streams in both directions.

Buffers are bounded: a stream's sender waits for credit, which its reader gives as it reads; a sender that exceeds its credit is disconnected. When
the initiator leaves an exchange, it is cancelled at the other end. Both processes import this package, so it knows asyncio and frames.py only.
"""

from pilotlight.functions.channel.connection import Channel, current_request
from pilotlight.functions.channel.exchanges import ExchangeResult, Handler, StreamingReply
from pilotlight.functions.channel.failure import ChannelClosed, Failure, as_failure
from pilotlight.functions.channel.streams import WINDOW_BYTES, Inbound

__all__ = [
    "WINDOW_BYTES",
    "Channel",
    "ChannelClosed",
    "ExchangeResult",
    "Failure",
    "Handler",
    "Inbound",
    "StreamingReply",
    "as_failure",
    "current_request",
]
