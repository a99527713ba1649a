"""A channel: many concurrent exchanges over one socket between the runtime and an isolate.

An exchange is a request, its reply, and a stream in each direction. Buffers are bounded: the reader of a stream grants credit as it reads, the sender
waits for credit, and a sender that exceeds it is disconnected. If the initiator cancels an exchange, it is cancelled at the other end. Both processes
import this package, so it imports only asyncio and msgspec.
"""
