"""The open exchanges of a channel: those started by this side and those started by the other.

One side uses even ids, the other odd ones.
"""

from pilotlight.functions.channel.exchanges import IncomingExchange, OutgoingExchange
from pilotlight.functions.channel.failure import ChannelClosed


class OpenExchanges:
    def __init__(self, parity: int) -> None:
        """`parity` (0 or 1) is the parity of this side's ids."""
        self.taken: dict[int, IncomingExchange] = {}
        self._started: dict[int, OutgoingExchange] = {}
        self._parity = parity
        self._next_id = parity

    def __len__(self) -> int:
        return len(self._started) + len(self.taken)

    def new_id(self) -> int:
        self._next_id += 2
        return self._next_id - 2

    def is_ours(self, id: int) -> bool:
        return id % 2 == self._parity

    def begin(self, exchange: OutgoingExchange) -> None:
        self._started[exchange.id] = exchange

    def get(self, id: int) -> OutgoingExchange | IncomingExchange | None:
        """Return an open exchange; None if it has ended."""
        return self._started.get(id) if self.is_ours(id) else self.taken.get(id)

    def forget(self, id: int) -> bool:
        """Remove a finished exchange; return False if it was removed before."""
        exchanges: dict[int, OutgoingExchange] | dict[int, IncomingExchange] = (
            self._started if self.is_ours(id) else self.taken
        )
        return exchanges.pop(id, None) is not None

    def fail(self, error: ChannelClosed) -> None:
        """Fail all exchanges with an error."""
        for started in list(self._started.values()):
            started.fail(error)
        self._started.clear()
        for taken in list(self.taken.values()):
            taken.cancel(error)
