"""A failure on one side of a channel, in the form sent to the other side: message, code, status."""

from typing import Any

from pilotlight.functions.channel.frames import Fail


class Failure(Exception):
    """An exchange failed at the other end, or must fail there."""

    def __init__(
        self,
        message: str,
        *,
        code: str | int = "internal_error",
        status: int = 500,
        name: str = "Error",
        detail: str = "",
        retry_after_s: int = 1,
        value: Any = None,
    ) -> None:
        """`retry_after_s` is sent to a function's callers with status 503.
        `value` is a result that is sent together with the failure."""
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.name = name
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.value = value

    def giving(self, value: Any) -> "Failure":
        """Set the result that is sent together with the failure; return the failure."""
        self.value = value
        return self


class ChannelClosed(Failure):
    """The connection to the other side is closed."""

    def __init__(self, message: str = "the connection to the other process is closed") -> None:
        super().__init__(message, code="closed", name="ChannelClosed")


def as_failure(error: BaseException) -> Failure:
    if isinstance(error, Failure):
        return error
    code, status = getattr(error, "code", "internal_error"), getattr(error, "status", 500)
    return Failure(
        str(error) or type(error).__name__,
        code=code if isinstance(code, (str, int)) else "internal_error",
        status=status if isinstance(status, int) else 500,
        name=type(error).__name__,
    )


def fail_frame(id: int, failure: Failure) -> Fail:
    message, detail = _sendable(failure.message[:8192]), _sendable(failure.detail[-65536:])
    return Fail(id, failure.code, failure.status, message, failure.name, detail, failure.value)


def failure_in(frame: Fail) -> Failure:
    status, name, detail = frame.status, frame.name, frame.detail
    return Failure(frame.message, code=frame.code, status=status, name=name, detail=detail, value=frame.value)


def _sendable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
