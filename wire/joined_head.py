"""Heads of Hypercorn's HTTP/1.1 answers that leave together with what follows them. `install` puts this in the place of Hypercorn's own.

Hypercorn writes a head as soon as the application begins its answer, and so each small answer in two pieces: its client wakes twice, and on a busy
machine whoever is woken by the first piece may run before the second is written. A head that says how long its body is waits for the first piece of
it; one of a stream leaves at once, since there its client learns from it that it is being served.
"""

from typing import Any

import h11
import hypercorn.protocol
from hypercorn.events import RawData
from hypercorn.protocol.h11 import H11Protocol


class JoinedHead(H11Protocol):
    _head = b""

    async def _send_h11_event(
        self, event: "h11.Response | h11.InformationalResponse | h11.Data | h11.EndOfMessage"
    ) -> None:
        try:
            data = self.connection.send(event) or b""
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        data, self._head = self._head + data, b""
        if isinstance(event, h11.Response) and any(name == b"content-length" for name, _ in event.headers):
            self._head = data
        else:
            await self.send(RawData(data=data))


def install() -> None:
    """For all connections of this process."""
    module: Any = hypercorn.protocol
    assert issubclass(module.H11Protocol, H11Protocol), "Hypercorn has no hypercorn.protocol.H11Protocol any more"
    module.H11Protocol = JoinedHead
