"""Arguments of a function's `scheduled` and `queue` handlers."""

from datetime import UTC, datetime
from typing import Any

from workers.face import Named, options_of
from workers.values import unpack


class ScheduledController(Named):
    """The argument of `scheduled`."""

    type = "scheduled"

    def __init__(self, cron: str, scheduled_time_ms: int) -> None:
        self.cron = cron
        self.scheduled_time = scheduled_time_ms

    def no_retry(self) -> None:
        """Do nothing: failed runs are not repeated anyway."""


class QueueMessage(Named):
    def __init__(self, fields: dict[str, Any]) -> None:
        self.id, self.attempts = fields["id"], fields.get("attempts", 1)
        self.timestamp = datetime.fromtimestamp(fields["timestamp_ms"] / 1000, UTC)
        self.body = unpack(fields.get("body"))
        self.decision: str | None = None
        self.delay_s: float | None = None

    def ack(self) -> None:
        self.decision = self.decision or "ack"

    def retry(self, options: Any = None, **named: Any) -> None:
        """Deliver the message again; `delaySeconds` may be in a dict or a keyword."""
        if self.decision is None:
            self.decision = "retry"
            self.delay_s = _delay(options, named)


class MessageBatch(Named):
    """The argument of `queue`: a batch of messages, and the handler's decisions about them."""

    def __init__(self, queue: str, messages: list[dict[str, Any]]) -> None:
        self.queue = queue
        self.messages = [QueueMessage(fields) for fields in messages]
        self._all: str | None = None
        self._delay_s: float | None = None

    def ack_all(self) -> None:
        self._all = self._all or "ack"

    def retry_all(self, options: Any = None, **named: Any) -> None:
        if self._all is None:
            self._all, self._delay_s = "retry", _delay(options, named)

    def outcome(self, *, has_failed: bool = False) -> dict[str, Any]:
        """Return the handler's decisions by message.
        Messages without a decision are acknowledged if the handler returns, and delivered again if it fails."""
        retried = []
        for message in self.messages:
            if (message.decision or self._all or ("retry" if has_failed else "ack")) == "retry":
                delay = message.delay_s if message.decision else self._delay_s
                retried.append({"id": message.id, "delay_s": delay})
        kept = {entry["id"] for entry in retried}
        return {"acked": [message.id for message in self.messages if message.id not in kept], "retried": retried}


def _delay(options: Any, named: dict[str, Any]) -> float | None:
    given = options_of(options, named, ("delay_seconds",), "retry")
    return given.get("delay_seconds")
