"""A connection of Hypercorn's that ends when its client has left it. `install` puts this in the place of Hypercorn's own.

Hypercorn's waits for `keep_alive_timeout` although nothing can come any more: a client that opens a connection for each request, as curl does,
leaves a file descriptor behind for 75 s, and fourteen such requests a second are all that a limit of 1024 descriptors allows.
"""

import hypercorn.asyncio.run
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.events import Event, Updated


class Connection(TCPServer):
    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated) and event.idle and self.reader.at_eof():
            return  # an answer that was still on its way is complete, and no request will follow it
        await super().protocol_send(event)

    async def _read_data(self) -> None:
        await super()._read_data()
        await self.idle_task.stop()


def install() -> None:
    """For all connections of this process."""
    assert hasattr(hypercorn.asyncio.run, "TCPServer"), "Hypercorn serves its connections otherwise than it did"
    hypercorn.asyncio.run.TCPServer = Connection
