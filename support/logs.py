"""The log of a process on standard error: one line per event, in the same format for all processes."""

import json
import logging
import os
import re
import time
from contextvars import ContextVar

LOG_ENV = "PILOTLIGHT_LOG"  # FORMAT:LEVEL:PROCESS, set by the parent process
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
REQUEST: ContextVar[str] = ContextVar("id of the request that is served", default="")


def start_logging(process: str, level: str = "info", form: str = "text") -> None:
    """Log to standard error from now on; processes that this one starts do the same.

    `process` is the name in each line: "router", or a site's name. `level` is debug, info, warning or error; `form` is text or json."""
    os.environ[LOG_ENV] = f"{form}:{level}:{process}"
    _log_as(process, level, form)


def inherit_logging(role: str) -> None:
    """Log in the format of the parent process, with its name and this `role`, such as ams1/engine."""
    form, level, process = os.environ.get(LOG_ENV, "text:info:").split(":", 2)
    _log_as(f"{process}/{role}" if process else role, level, form)


def _log_as(process: str, level: str, form: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines(process) if form == "json" else TextLines(process))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextLines(logging.Formatter):
    """Format lines such as 2026-11-28T11:52:16.042Z ams1 INFO listening on http://127.0.0.1:8791."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        text, request = record.getMessage(), REQUEST.get()
        line = f"{_time_of(record)} {self._process} {record.levelname} {text}"
        if request and request not in text:
            line += f" (request {request})"
        # A message may contain a client's text: a line end in it must not start a new line.
        line = line.replace("\r", "\\r").replace("\n", "\\n")
        return "\n".join([line, *_trace_of(self, record)])


class JsonLines(logging.Formatter):
    """Format one JSON object a line: time, process, pid, level, logger and message.

    The fields request_id, exception and access are added if present.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time_of(record),
            "process": self._process,
            "pid": record.process,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := REQUEST.get():
            line["request_id"] = request
        line |= getattr(record, "fields", {})
        if trace := _trace_of(self, record):
            line["exception"] = "\n".join(trace)
        return json.dumps(line, ensure_ascii=False, default=str)


def printable(text: str, keep: str = "\t") -> str:
    """Return text with control characters escaped, except those in `keep`.
    They could move a terminal's cursor, forge a line, or reverse the direction of text."""
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


def _time_of(record: logging.LogRecord) -> str:
    """Return the time in UTC, to the millisecond (RFC 3339)."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _trace_of(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    found = [formatter.formatException(record.exc_info)] if record.exc_info else []
    return [*found, formatter.formatStack(record.stack_info)] if record.stack_info else found
