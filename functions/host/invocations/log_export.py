"""Sends functions' invocations and their output to a collector, with OTLP over HTTP.

Each invocation and each line of output is a record, with attributes by OpenTelemetry's conventions for functions. A thread sends batches; records
that do not fit into its queue, whose memory is limited, are dropped and counted. Independent of the log's storage (log_store.py).
"""

import sys
from collections import deque
from threading import Lock
from typing import Any, cast

from pilotlight.functions.host.invocations.log_store import InvocationRow
from pilotlight.sites.config import ConfigError
from pilotlight.wire.tracing import SEND_TIMEOUT_S, otlp_url, shut_down

MAX_QUEUED_BYTES = 64 << 20
RECORD_BYTES = 1 << 10  # memory of a record besides its texts, as measured


class LogExport:
    def __init__(self, collector: str, site: str, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        """`collector` is a URL; OTLP's path is added if it has none.

        `max_bytes` limits the memory of queued records. Raises ConfigError if the packages for the export are not installed.
        """
        try:
            from opentelemetry._logs import LogRecord, SeverityNumber
            from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
            from opentelemetry.sdk._logs import LoggerProvider
            from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise ConfigError(
                f"functions.logs_otlp needs the extra packages of pilotlight-inference[telemetry]: {error}"
            ) from None
        resource = Resource.create({"service.name": "pilotlight-functions", "pilotlight.site": site})
        self._provider = LoggerProvider(resource, shutdown_on_exit=False)
        self._queue = _Queue(max_bytes)
        exporter = _Exporter(OTLPLogExporter(otlp_url(collector, "logs"), timeout=SEND_TIMEOUT_S), self._queue)
        most = max_bytes // RECORD_BYTES
        self._provider.add_log_record_processor(BatchLogRecordProcessor(cast("Any", exporter), max_queue_size=most))
        self._logger = self._provider.get_logger("pilotlight.functions")
        self._record = LogRecord
        self._severities = {"log": SeverityNumber.INFO, "error": SeverityNumber.ERROR}

    @property
    def num_dropped(self) -> int:
        """The number of records that did not fit into the queue or were not sent."""
        return self._queue.num_dropped

    def line(self, function: str, version: str, invocation: int, at_s: float, level: str, text: str) -> None:
        """Queue a line of output."""
        self._emit(at_s, level, text, _names(function, version, invocation))

    def invocation(self, row: InvocationRow) -> None:
        """Queue the record of an ended invocation."""
        attributes = {
            "faas.trigger": row.trigger, "pilotlight.outcome": row.outcome, "pilotlight.wall_ms": row.wall_ms,
            "pilotlight.cpu_ms": row.cpu_ms,
        }  # fmt: skip
        if row.status is not None:
            attributes["http.response.status_code"] = row.status
        if row.error:
            attributes |= {"exception.message": row.error, "exception.stacktrace": row.detail}
        level = "error" if row.error or (row.status or 0) >= 500 else "log"
        self._emit(row.at_s, level, row.what, {**_names(row.function, row.version, row.id), **attributes})

    def close(self) -> None:
        """Send the remaining records. This waits for the collector, so do not call it in an event loop."""
        shut_down(self._provider)

    def _emit(self, at_s: float, level: str, text: str, attributes: dict[str, Any]) -> None:
        if not self._queue.add(RECORD_BYTES + sum(map(sys.getsizeof, (text, *attributes.values())))):
            return
        severity = self._severities.get(level, self._severities["log"])
        self._logger.emit(
            self._record(
                timestamp=int(at_s * 1e9),
                severity_number=severity,
                severity_text=level,
                body=text,
                attributes=attributes,
            )
        )


class _Queue:
    """The sizes of the queued records, in their order."""

    def __init__(self, max_bytes: int) -> None:
        self.num_dropped = 0
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._sizes: deque[int] = deque()
        self._changing = Lock()  # records are exported in another thread

    def add(self, num_bytes: int) -> bool:
        """Return whether a record fits into the queue; count it as queued or as dropped."""
        with self._changing:
            if self._num_bytes + num_bytes > self._max_bytes:
                self.num_dropped += 1
                return False
            self._num_bytes += num_bytes
            self._sizes.append(num_bytes)
            return True

    def remove(self, num_records: int, *, is_sent: bool) -> None:
        with self._changing:
            self._num_bytes -= sum(self._sizes.popleft() for _ in range(num_records))
            self.num_dropped += 0 if is_sent else num_records


class _Exporter:
    """An exporter that reports to the queue which records it has sent, or could not send."""

    def __init__(self, exporter: Any, queue: _Queue) -> None:
        self._exporter = exporter
        self._queue = queue

    def export(self, batch: Any) -> Any:
        is_sent = False
        try:
            result = self._exporter.export(batch)
            is_sent = result.name == "SUCCESS"
        finally:
            self._queue.remove(len(batch), is_sent=is_sent)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _names(function: str, version: str, invocation: int) -> dict[str, Any]:
    return {"faas.name": function, "faas.version": version, "faas.invocation_id": str(invocation)}
