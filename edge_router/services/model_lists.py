"""Lists of the network's models, as an ASGI application.

Sites have different models. Sites with the same models are one kind, and one site of each kind is asked.
"""

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import orjson
from msgspec.structs import asdict
from starlette.types import Receive, Scope, Send

from pilotlight.edge_router.forwarding.downstream import Downstream
from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.forwarding.request_state import RequestState
from pilotlight.edge_router.forwarding.upstream import UpstreamResponse
from pilotlight.edge_router.metering.ledger.prices import PriceList
from pilotlight.edge_router.requests.request import Head, ValidRequest
from pilotlight.edge_router.routing.views import Preference
from pilotlight.edge_router.telemetry.metrics import NO_SITE
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.workers_ai import MOST_PER_PAGE, page_of

_ACCOUNT = r"/client/v4/accounts/[^/]+"
_PATH = re.compile(
    rf"(?:{_ACCOUNT})?(?:/ai)?/v1/models(?:/(?P<model>.+))?|{_ACCOUNT}/ai/models/(?P<verb>search|schema)"
    r"|/api/(?:tags|ps)"
)

Fields = dict[str, Any]


class Answer(NamedTuple):
    status: int
    body: bytes


class ModelLists:
    """Combines the lists of all sites.

    If several sites list a model, the first site's entry counts, in the order of the router's file. An account sees the models that it may use, and
    every client sees prices.
    """

    def __init__(self, proxy: Proxy, prices: PriceList) -> None:
        self._proxy = proxy
        self._prices = prices

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Downstream(scope, receive, send)
        await self._proxy.handle(client, self._admit(client))

    async def _admit(self, client: Downstream) -> None:
        config = self._proxy.config
        with await self._proxy.admission.admit(client.head, client.address):
            await client.body(int(config.max_body_mib * 2**20), config.idle_timeout_s, config.answer_timeout_s)
            status, body = await client.while_present(self._answer(client))
        self._proxy.metrics.ended(NO_SITE, "ok" if status == HTTPStatus.OK else "client_error")
        await client.respond_json(body, status)

    async def _answer(self, client: Downstream) -> Answer:
        found = _PATH.fullmatch(client.head.path)
        assert found is not None, "service_table.py has looked"
        query = dict(parse_qsl(client.head.target.partition("?")[2], keep_blank_values=True))
        if found["verb"] == "search":
            return await self._searched(client, query)
        if found["verb"] == "schema":
            return await self._one(client, query.get("model", ""))
        return await self._listed(client) if found["model"] is None else await self._one(client, found["model"])

    async def _listed(self, client: Downstream) -> Answer:
        field = "models" if client.head.dialect is Dialect.OLLAMA else "data"
        lists = await self._lists(client, client.head, field)
        if isinstance(lists, Answer):
            return lists
        shown = self._shown(client.head, (entry for fields in lists for entry in fields[field]))
        fields = {**lists[0], field: shown}
        if "first_id" in fields:  # only Anthropic's form has these fields
            fields["first_id"], fields["last_id"] = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return Answer(200, orjson.dumps(fields))

    async def _searched(self, client: Downstream, query: Mapping[str, str]) -> Answer:
        """Combine whole lists of the sites, and divide the result into pages."""
        head = client.head
        path, _, text = head.target.partition("?")
        parts = [part for part in text.split("&") if part and part.partition("=")[0] not in ("page", "per_page")]
        target = f"{path}?{'&'.join([*parts, f'per_page={MOST_PER_PAGE}'])}"
        everything = Head(head.method, head.path, target, head.headers, holder=head.holder)
        lists = await self._lists(client, everything, "result")
        if isinstance(lists, Answer):
            return lists
        shown = self._shown(head, (card for fields in lists for card in fields["result"]))
        if not shown and not self._is_complete():
            sentence = "no model was found, but a site that may have it is unreachable: try again later"
            raise ApiError("no_site_available", sentence, retry_after_s=1)
        cards, info = page_of(shown, query)
        return Answer(200, orjson.dumps({**lists[0], "result": cards, "result_info": asdict(info)}))

    async def _one(self, client: Downstream, model: str) -> Answer:
        """Ask one site of each kind whether it has an adapter.

        If a site does not answer, its error is returned instead of a 404, because it may have the model. Raises ApiError.
        """
        holder = client.head.holder
        found: Answer | ApiError = ApiError(
            "model_not_found", f"no site has a model named {model[:200]!r}", param="model"
        )
        if holder is None or holder.account.may_use(*self._names(model)):
            request = self._request(client, client.head)
            for sites in self._kinds(model):
                answer = await self._ask(client, request, sites)
                if isinstance(answer, Answer) and answer.status == HTTPStatus.OK:
                    entry = _object(answer.body)
                    if entry is None or not _is_entry(entry):
                        return answer
                    return Answer(200, orjson.dumps(self._priced(entry)))
                if not _is_no_site(found):
                    found = answer
        if isinstance(found, ApiError):
            raise found
        return found

    async def _lists(self, client: Downstream, head: Head, field: str) -> list[Fields] | Answer:
        """Return the lists of all kinds of sites that have one, otherwise the first answer. Raises ApiError."""
        request = self._request(client, head)
        answers = await asyncio.gather(*[self._ask(client, request, sites) for sites in self._kinds()])
        lists = [fields for answer in answers if (fields := _listing(answer, field)) is not None]
        if lists:
            return lists
        for answer in answers:
            if isinstance(answer, Answer):
                return answer
        raise next(answer for answer in answers if isinstance(answer, ApiError))

    def _request(self, client: Downstream, head: Head) -> ValidRequest:
        return self._proxy.parser.parse(head, b"", client.request_id, client.address)

    def _kinds(self, model: str | None = None) -> Iterable[set[str]]:
        """Group the sites to ask by the models that they publish.

        With `model`, return only sites that publish it or have published nothing. If none of these is usable, unusable ones are returned.
        """
        views = [backend.view() for backend in self._proxy.selector.backends.values()]
        if model is not None:
            views = [view for view in views if view.status is None or view.model(model) is not None]
        kinds: dict[object, set[str]] = {}
        for view in [view for view in views if view.is_usable] or views:
            status = view.status
            served = view.name if status is None else frozenset((known.name, known.aliases) for known in status.models)
            kinds.setdefault(served, set()).add(view.name)
        return kinds.values()

    def _is_complete(self) -> bool:
        """Tell whether each known model is at a reachable site, and each site has published its models."""
        views = [backend.view() for backend in self._proxy.selector.backends.values()]
        usable = [view for view in views if view.is_usable]
        return all(
            view.status is not None
            and all(any(one.model(known.name) for one in usable) for known in view.status.models)
            for view in views
            if not view.is_usable
        )

    async def _ask(self, client: Downstream, request: ValidRequest, sites: set[str]) -> Answer | ApiError:
        """Send a request to one of `sites`; return the first answer, or an error if no site answers."""
        proxied = self._proxy.proxied(request)
        proxied.tries.excluded |= self._proxy.selector.backends.keys() - sites
        answers: list[Answer] = []

        async def keep(proxied: RequestState, response: UpstreamResponse, preference: Preference) -> None:
            answers.append(Answer(response.status, response.body or b""))

        try:
            await self._proxy.try_sites(client, proxied, keep)
        except ApiError as error:
            return error
        return answers[0]

    def _shown(self, head: Head, entries: Iterable[Fields]) -> list[Fields]:
        account = None if head.holder is None else head.holder.account
        firsts: dict[str, Fields] = {}
        for entry in entries:
            firsts.setdefault(_id(entry), entry)
        return [
            self._priced(entry) for id, entry in firsts.items() if account is None or account.may_use(*self._names(id))
        ]

    def _names(self, model: str) -> list[str]:
        """Return all names of a model, each with the requested adapter."""
        if (known := self._proxy.selector.known_model(model)) is None:
            return [model]
        names = [known.name, *known.aliases]
        return names if model in names else [f"{name}:{model.rpartition(':')[2]}" for name in names]

    def _priced(self, entry: Fields) -> Fields:
        price = self._prices.listed(_id(entry), time.time())
        return entry if price is None else {**entry, "pricing": price}


def _is_no_site(answer: Answer | ApiError) -> bool:
    return isinstance(answer, ApiError) and answer.word == "no_site_available"


def _listing(answer: Answer | ApiError, field: str) -> Fields | None:
    """Return a site's list; None if the answer is not one."""
    if isinstance(answer, ApiError) or answer.status != HTTPStatus.OK:
        return None
    fields = _object(answer.body)
    entries = None if fields is None else fields.get(field)
    return fields if isinstance(entries, list) and all(map(_is_entry, entries)) else None


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(_id(entry), str)


def _id(entry: Fields) -> Any:
    """Return the model's name of an entry. Ollama's lists call it `model`."""
    return entry.get("id", entry.get("model"))


def _object(body: bytes) -> Fields | None:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) else None
