"""The invocations of one function at all sites, as one list: for `pilotlight logs` and for pages."""

import re
from collections.abc import Mapping

import msgspec
from starlette.datastructures import QueryParams

from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.function_logs import OUTCOMES, STATUS, FoundLogs, LoggedInvocation, LogQuery

TEXTS = ("since_s", "grep", "status", "limit")
LogsAnswer = list[LoggedInvocation] | str  # a string is the reason why a site gave none


def log_query(function: str, asked: QueryParams) -> tuple[LogQuery, dict[str, int]]:
    """Read a client's query: `since_s`, `grep`, `status`, `limit`, and several `after`, as SITE:SEQ.
    Raises ApiError."""
    if unknown := sorted(set(asked) - {*TEXTS, "after"}):
        raise ApiError(
            "invalid_request", f"logs are filtered by {', '.join(TEXTS)} and after, not by {unknown[0][:64]!r}"
        )
    if not re.fullmatch(STATUS, asked.get("status", "error")):
        sentence = f"status is an HTTP status (404, 5xx), an outcome ({', '.join(OUTCOMES)}), or error, and not {asked['status'][:64]!r}"
        raise ApiError("invalid_request", sentence)
    try:
        query = msgspec.convert(
            {"function": function, **{name: asked[name] for name in TEXTS if name in asked}}, LogQuery, strict=False
        )
        pairs = (each.rpartition(":") for each in asked.getlist("after"))
        return query, {site: int(seq) for site, _, seq in pairs}
    except (msgspec.ValidationError, ValueError) as error:
        raise ApiError("invalid_request", f"the query for logs is invalid: {error}") from None


def merged_logs(answers: Mapping[str, LogsAnswer], query: LogQuery, after: Mapping[str, int]) -> FoundLogs:
    """Merge the answers of sites, by name.

    If `after` names positions, all invocations of the answers are returned; otherwise the newest `query.limit`.
    """
    found: list[LoggedInvocation] = []
    seen, unread = dict(after), {}
    for site, answer in answers.items():
        if isinstance(answer, str):
            unread[site] = answer
            continue
        found += answer
        seen[site] = max([seen.get(site, 0), *(invocation.seq for invocation in answer)])
    found.sort(key=lambda invocation: invocation.at_s)
    return FoundLogs(found if after else found[-query.limit :], seen, unread)
