"""GET /usage: usage of accounts, as JSON or CSV. Admin keys see all accounts, others their own."""

import csv
import io
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pilotlight.edge_router.metering.ledger.accounting import Accounting
from pilotlight.edge_router.metering.ledger.ledger_store import GROUPS, SUMS, UsageQuery
from pilotlight.edge_router.metering.ledger.prices import BILLIONTHS
from pilotlight.page.sessions import Sessions
from pilotlight.wire.credentials import Access
from pilotlight.wire.errors import ApiError

PATH = "/usage"


class UsageRoutes:
    def __init__(self, accounting: Accounting, access: Access, sessions: Sessions) -> None:
        self._accounting = accounting
        self._access = access
        self._sessions = sessions

    def routes(self) -> list[Route]:
        return [Route(PATH, self.usage)]

    async def usage(self, request: Request) -> Response:
        """Return usage.

        `?from=&to=` are dates or times, in UTC by default; `?by=` is a list of some of GROUPS; `?account=`; `?format=csv`.
        """
        query = self._asked(request)
        ledger = self._accounting.ledger
        if ledger is None:
            raise ApiError("not_found", "usage is not recorded: set ledger.directory in the router's file")
        rows = [_told(row) for row in await ledger.usage(query)]
        if request.query_params.get("format") == "csv":
            return Response(_csv(rows, query.by), media_type="text/csv; charset=utf-8", headers=NOT_KEPT)
        fields = {"currency": self._accounting.prices.currency, "by": query.by, "usage": rows}
        return Response(orjson.dumps(fields), media_type="application/json", headers=NOT_KEPT)

    def _asked(self, request: Request) -> UsageQuery:
        """Return the query of a request. Raises ApiError."""
        params = request.query_params
        account = self._account(request, params.get("account"))
        by = tuple(name for name in params.get("by", "account,model").split(",") if name)
        if unknown := [name for name in by if name not in GROUPS]:
            known = ", ".join(GROUPS)
            raise ApiError("invalid_request", f"by must be some of {known}, and not {unknown[0][:100]!r}", param="by")
        if params.get("format", "json") not in ("json", "csv"):
            raise ApiError("invalid_request", "format must be json or csv", param="format")
        default = UsageQuery()
        from_s, to_s = (
            _moment(params.get("from"), "from", default.from_s),
            _moment(params.get("to"), "to", default.to_s),
        )
        return UsageQuery(from_s, to_s, by, account)

    def _account(self, request: Request, wanted: str | None) -> str | None:
        """Return the account whose usage is reported; None for all. Raises ApiError."""
        authorization = request.headers.get("authorization")
        if authorization is None or not self._access.is_required:
            self._sessions.visitor(request, "admin")  # the page sends its cookie instead of a key
            return wanted
        key = self._access.key(authorization, "models")
        if key.is_admin:
            return wanted
        if wanted not in (None, key.account.name):
            raise ApiError(
                "forbidden", f"the key {key.name} may read the usage of its account only, {key.account.name}"
            )
        return key.account.name


SECONDS = {"device_us": "device_s", "cpu_us": "cpu_s"}  # names in reports, because sums are in seconds there
NOT_KEPT = {"cache-control": "no-store"}


def _told(row: dict[str, Any]) -> dict[str, Any]:
    cost = row["cost"]
    told = {SECONDS.get(name, name): value / 1e6 if name in SECONDS else value for name, value in row.items()}
    return {**told, "cost": None if cost is None else _decimal(cost)}


def _decimal(billionths: int) -> str:
    """Return a sum as a decimal number with all of its digits."""
    sign, whole = "-" if billionths < 0 else "", abs(billionths)
    return f"{sign}{whole // BILLIONTHS}.{whole % BILLIONTHS:09d}"


def _csv(rows: Sequence[dict[str, Any]], by: Sequence[str]) -> str:
    sums = ("requests", *(SECONDS.get(name, name) for name in SUMS), "cost")
    text = io.StringIO()
    writer = csv.DictWriter(text, [*by, *sums], lineterminator="\r\n")  # RFC 4180
    writer.writeheader()
    writer.writerows([{name: _plain(value) for name, value in row.items()} for row in rows])
    return text.getvalue()


def _plain(value: Any) -> Any:
    """Return a value that no spreadsheet takes for a formula. A client may choose any model name."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _moment(text: str | None, name: str, default: float) -> float:
    if text is None:
        return default
    parse: Callable[[str], datetime] = datetime.fromisoformat
    try:
        found = parse(text.replace(" ", "+"))  # a + that the client did not encode
        return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ApiError("invalid_request", f"{name} must be a date, as 2026-11-01, or a time", param=name) from None
