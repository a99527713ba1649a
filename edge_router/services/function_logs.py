"""The invocations of one function at all sites, as one list: for `pilotlight logs` and for pages."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import aiohttp
import msgspec
from starlette.datastructures import QueryParams

from pilotlight.edge_router.backends.backend import Backend
from pilotlight.wire.errors import ApiError, message_of
from pilotlight.wire.hop.function_logs import LOGS_PATH, FoundLogs, LoggedInvocation, LogQuery

TIMEOUT_S = 15.0
TEXTS = ("since_s", "grep", "status", "limit")
Sign = Callable[[str, str, str, bytes], dict[str, str]]  # method, path, site and body to headers

Found = list[LoggedInvocation] | str
"""A site's answer, or why there is none."""


def log_query(function: str, asked: QueryParams) -> tuple[LogQuery, dict[str, int]]:
    """Read a client's query: `since_s`, `grep`, `status`, `limit`, and several `after`, as SITE:SEQ.
    Raises ApiError."""
    if unknown := sorted(set(asked) - {*TEXTS, "after"}):
        raise ApiError("invalid_request", f"logs are asked by {', '.join(TEXTS)} and after, not by {unknown[0][:64]!r}")
    try:
        query = msgspec.convert(
            {"function": function, **{name: asked[name] for name in TEXTS if name in asked}}, LogQuery, strict=False
        )
        pairs = (each.rpartition(":") for each in asked.getlist("after"))
        return query, {site: int(seq) for site, _, seq in pairs}
    except (msgspec.ValidationError, ValueError) as error:
        raise ApiError("invalid_request", f"logs cannot be asked so: {error}") from None


async def find_logs(sites: Iterable[Backend], query: LogQuery, after: dict[str, int], sign: Sign) -> FoundLogs:
    """Ask sites at once.
    Of more than `query.limit` invocations the newest are returned, or, after a `seq`, the oldest of each site."""
    asked = [*sites]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S, sock_connect=5.0)) as session:
        answers = await asyncio.gather(*(_ask(session, site, query, after.get(site.name, 0), sign) for site in asked))
    found: list[LoggedInvocation] = []
    seen, unread = dict(after), {}
    for site, answer in zip(asked, answers, strict=True):
        if isinstance(answer, str):
            unread[site.name] = answer
            continue
        found += answer
        seen[site.name] = max([seen.get(site.name, 0), *(invocation.seq for invocation in answer)])
    found.sort(key=lambda invocation: invocation.at_s)
    return FoundLogs(found if after else found[-query.limit :], seen, unread)


async def _ask(session: aiohttp.ClientSession, site: Backend, query: LogQuery, after: int, sign: Sign) -> Found:
    body = msgspec.json.encode(msgspec.structs.replace(query, after=after))
    try:
        headers = sign("POST", LOGS_PATH, site.name, body)
        async with session.post(site.url + LOGS_PATH, data=body, headers=headers) as answer:
            data: Any = await answer.read()
            if answer.status != 200:
                return f"{answer.status} {message_of(data)}"
            return msgspec.json.decode(data, type=list[LoggedInvocation])
    except TimeoutError:
        return f"nothing was heard within {TIMEOUT_S:g} s"
    except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
        return str(error)
