"""The router's API of Workers AI's fine-tunes, as an ASGI application.

One site validates an upload, and the others copy it from there.
"""

from http import HTTPStatus
from typing import Any

import orjson
from msgspec.structs import asdict
from starlette.types import Receive, Scope, Send

from pilotlight.edge_router.forwarding.downstream import Downstream
from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.services.finetune_registry import SiteFinetunes
from pilotlight.wire.errors import ApiError, message_of
from pilotlight.wire.fine_tuning import JOBS, jobs_answer
from pilotlight.wire.hop.finetunes import FINETUNES, Finetune
from pilotlight.wire.hop.headers import ACCOUNT, HOP_SECRET_ENV

CREATE_BYTES = 64 << 10
FORM_BYTES = 16 << 10  # limit of a form's size without its file
UPLOAD_S = 600.0
_AT_SITES = "/client/v4/accounts/-/ai/finetunes"  # "-" as the account: sites identify the owner by the key

Answer = tuple[int, bytes]


class RoutedFinetunes:
    def __init__(self, proxy: Proxy, finetunes: SiteFinetunes) -> None:
        self._proxy = proxy
        self._finetunes = finetunes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Downstream(scope, receive, send)
        await self._proxy.handle(client, self._admit(client))

    async def _admit(self, client: Downstream) -> None:
        config = self._proxy.config
        jobs, found = JOBS.fullmatch(client.head.path), FINETUNES.match(client.head.path)
        with await self._proxy.admission.admit(client.head, client.address):
            if not self._proxy.parser.secret:
                sentence = f"fine-tunes need a network secret: set {HOP_SECRET_ENV}, at routers and sites"
                raise ApiError("not_found", sentence)
            if jobs is not None:
                await client.body(CREATE_BYTES, config.idle_timeout_s, UPLOAD_S)
                status, answer = await client.while_present(self._jobs(client, jobs["job"], jobs["part"]))
            else:
                assert found is not None, "service_table.py has looked"
                limit = int(config.max_finetune_mib * 2**20) + FORM_BYTES if found["assets"] else CREATE_BYTES
                body = await client.body(limit, config.idle_timeout_s, UPLOAD_S, "max_finetune_mib")
                work = self._answer(client, found["id"], bool(found["assets"]), body)
                status, answer = await client.while_present(work)
        await client.respond_json(answer, status)

    async def _jobs(self, client: Downstream, job: str | None, part: str | None) -> Answer:
        """Answer a request for OpenAI's fine-tuning jobs. Raises ApiError."""
        await self._finetunes.look()
        owned = self._finetunes.of(self._finetunes.owner(client.head)).values()
        return HTTPStatus.OK, orjson.dumps(jobs_answer(client.head.method, job, part, owned))

    async def _answer(self, client: Downstream, id: str | None, is_file: bool, body: bytes) -> Answer:
        """Answer a request under the account's path of fine-tunes. Raises ApiError."""
        head, finetunes = client.head, self._finetunes
        await finetunes.look()
        owned = finetunes.of(finetunes.owner(head))
        match head.method, id, is_file:
            case "GET", None, False:
                return _enveloped([asdict(each.listed()) for each in owned.values()])
            case "POST", None, False:
                return await self._create(client, owned, body)
            case "DELETE", str(), False:
                finetune = _one_of(owned, id)
                keeping = await finetunes.remove(finetune)
                return _enveloped(asdict(finetune.listed()), keeping)
            case "POST", str(), True:
                return await self._upload(client, _one_of(owned, id), body)
        raise ApiError("method_not_allowed", f"{head.path[:200]} does not take {head.method}")

    async def _create(self, client: Downstream, owned: dict[str, Finetune], body: bytes) -> Answer:
        try:
            fields = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ApiError("malformed_json", f"the body is not valid JSON: {error}") from None
        model, name = (fields.get("model"), fields.get("name")) if isinstance(fields, dict) else (None, None)
        if not (isinstance(model, str) and isinstance(name, str) and model and name):
            raise ApiError("invalid_request", 'the body must be an object such as {"model": MODEL, "name": NAME}')
        holder = client.head.holder
        if holder is not None:
            holder.account.check_model(f"{model}:{name}")
        if any(each.name == name for each in owned.values()):
            raise ApiError("conflict", f"there is a fine-tune named {name[:100]!r} already", param="name")
        wanted = Finetune("", "", "" if holder is None else holder.account.name, model, name)
        failures = []
        for site in self._finetunes.keepers():
            if self._finetunes.may_have(site, wanted):
                status, answer = await self._ask(client, site.name, "", body)
                if status:
                    return status, answer
                failures.append(f"{site.name}: {message_of(answer)}")
        sentence = f"no site that accepts fine-tunes and serves {model[:200]!r} is reachable"
        raise ApiError("no_site_available", "; ".join([sentence, *failures]), retry_after_s=1)

    async def _upload(self, client: Downstream, finetune: Finetune, body: bytes) -> Answer:
        sites = self._finetunes.with_one(finetune.id)
        if not sites:
            sentence = f"no site that has {finetune.name} is reachable: send its file again later"
            raise ApiError("no_site_available", sentence, retry_after_s=1)
        status, answer = await self._ask(client, sites[0].name, f"/{finetune.id}/finetune-assets", body)
        if status == 0:
            raise ApiError("upstream_lost", f"the site {sites[0].name} was lost: {message_of(answer)}")
        if status != HTTPStatus.OK:
            return status, answer
        await self._finetunes.look()
        now = self._finetunes.of(finetune.owner).get(finetune.id)
        if now is None or not now.is_whole:
            return status, answer
        return status, orjson.dumps({**orjson.loads(answer), "messages": await self._finetunes.spread(now)})

    async def _ask(self, client: Downstream, site: str, path: str, body: bytes) -> Answer:
        head, orders = client.head, self._finetunes.orders
        headers = {"content-type": head.header("content-type")} if head.has("content-type") else {}
        if head.holder is not None:
            headers[ACCOUNT] = head.holder.account.name
        elif key := self._finetunes.key(head):
            headers["authorization"] = f"Bearer {key}"
        told = await orders.exchange("POST", site, _AT_SITES + path, body, headers=headers, timeout_s=UPLOAD_S)
        return told.status, told.body


def _one_of(owned: dict[str, Finetune], id: str | None) -> Finetune:
    found = owned.get(id or "") or next((each for each in owned.values() if each.name == id), None)
    if found is None:
        raise ApiError("not_found", f"there is no fine-tune {(id or '')[:100]!r}")
    return found


def _enveloped(result: Any, messages: list[str] | None = None) -> Answer:
    return 200, orjson.dumps({"result": result, "success": True, "errors": [], "messages": messages or []})
