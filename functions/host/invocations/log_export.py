"""Sends functions' invocations and their output to a collector, with OTLP over HTTP.

Each invocation and each line of output is a record, with attributes by OpenTelemetry's conventions for functions. A thread sends batches; records
that do not fit into its queue are lost. Independent of the log's storage (log_store.py).
"""

from typing import Any

from pilotlight.functions.host.invocations.log_store import InvocationRow
from pilotlight.sites.config import ConfigError
from pilotlight.wire.tracing import SEND_TIMEOUT_S, otlp_url, shut_down

MAX_QUEUED = 50_000


class LogExport:
    def __init__(self, collector: str, site: str) -> None:
        """`collector` is a URL; OTLP's path is added if it has none.

        Raises ConfigError if the packages for the export are not installed.
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
        exporter = OTLPLogExporter(otlp_url(collector, "logs"), timeout=SEND_TIMEOUT_S)
        self._provider.add_log_record_processor(BatchLogRecordProcessor(exporter, max_queue_size=MAX_QUEUED))
        self._logger = self._provider.get_logger("pilotlight.functions")
        self._record = LogRecord
        self._severities = {"log": SeverityNumber.INFO, "error": SeverityNumber.ERROR}

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


def _names(function: str, version: str, invocation: int) -> dict[str, Any]:
    return {"faas.name": function, "faas.version": version, "faas.invocation_id": str(invocation)}
