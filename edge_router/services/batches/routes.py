"""OpenAI's files and batches, and Workers AI's `queueRequest`, as one ASGI application over one queue."""

import re
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar
from urllib.parse import parse_qs, quote

import orjson
from starlette.types import Receive, Scope, Send

from pilotlight.edge_router.forwarding.downstream import Downstream
from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.services.batches.batch_store import (
    INPUT,
    KEPT_S,
    WITHIN_S,
    BatchCounts,
    StoredBatch,
    StoredFile,
    batch_fields,
    file_fields,
)
from pilotlight.edge_router.services.batches.lines import (
    ENDPOINTS,
    AskedLine,
    Fields,
    read_lines,
    read_object,
    read_queued,
)
from pilotlight.edge_router.services.batches.queue import BatchQueue
from pilotlight.wire.credentials import owner_of, tenant_of
from pilotlight.wire.errors import ApiError
from pilotlight.wire.forms import file_in, read_form
from pilotlight.wire.hop.headers import IGNORED

Item = TypeVar("Item", StoredBatch, StoredFile)

MOST_METADATA = 16  # names in metadata, as at OpenAI
MOST_IGNORED = 16  # names of ignored fields in a header
LEAST_KEPT_S = 3600  # shortest lifetime of a file, as at OpenAI
EXPIRES, OUTPUT_EXPIRES = "expires_after", "output_expires_after"
ANCHORED = ("anchor", "seconds")
FORM_FIELDS = ("file", "purpose", *(f"{EXPIRES}[{name}]" for name in ANCHORED))
BATCH_FIELDS = ("endpoint", "input_file_id", "completion_window", "metadata", OUTPUT_EXPIRES)
_PATH = re.compile(
    r"^(?P<before>(?:/client/v4/accounts/(?P<account>[^/]+))?(?:/ai)?)/v1/(?P<what>files|batches)(?:/(?P<id>[^/]+)(?:/(?P<verb>content|cancel))?)?$"
)
_RUN = re.compile(r"^/client/v4/accounts/(?P<account>[^/]+)/ai/run/(?P<model>.+)$")


class BatchRoutes:
    def __init__(self, proxy: Proxy, queue: BatchQueue | None) -> None:
        """`queue` is None if the router has no directory for batches."""
        self._proxy = proxy
        self._queue = queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Downstream(scope, receive, send)
        await self._proxy.handle(client, self._admit(client))

    async def _admit(self, client: Downstream) -> None:
        config = self._proxy.config
        with await self._proxy.admission.admit(client.head, client.address):
            limit = int(config.max_body_mib * 2**20)
            body = await client.body(limit, config.idle_timeout_s, config.answer_timeout_s)
            if self._queue is None:
                raise ApiError(
                    "not_found",
                    "batches are disabled: set ledger.directory in the router's file, and run the router without --workers",
                )
            await client.while_present(self._answer(client, self._queue, _Asked(self._queue, client, body)))

    async def _answer(self, client: Downstream, queue: BatchQueue, asked: "_Asked") -> None:
        told = await asked.answer()
        if isinstance(told, StoredFile):
            return await _send_content(client, queue, told)
        if isinstance(told, StoredBatch):
            return await _send_responses(client, queue, told)
        body = await queue.do(orjson.dumps, told)
        ignored = ", ".join(quote(name[:64], safe="[]_. ") for name in asked.ignored[:MOST_IGNORED])
        await client.respond_json(body, headers=[(IGNORED, ignored)] if ignored else ())


async def _send_content(client: Downstream, queue: BatchQueue, file: StoredFile) -> None:
    """Send a file part by part, because the answers of a night may not fit in a router's memory."""
    length = ("content-length", str(file.num_bytes))
    await client.start_stream(200, [("content-type", "application/octet-stream"), length])
    part, behind = await queue.do(queue.store.part, file)
    while behind:
        await client.write(part)
        part, behind = await queue.do(queue.store.part, file, behind)
    await client.write(part)
    await client.end_stream()


async def _send_responses(client: Downstream, queue: BatchQueue, batch: StoredBatch) -> None:
    """Send the answers of a Workers AI batch, part by part."""
    model = batch.path.partition("/ai/run/")[2]
    told = orjson.dumps({"status": "complete", "request_id": batch.id, "model": model})
    await client.start_stream(200, [("content-type", "application/json")])
    await client.write(b'{"result":' + told[:-1] + b',"responses":[')
    part, behind, position = await queue.do(queue.store.responses, batch)
    while behind:
        await client.write(part)
        part, behind, position = await queue.do(queue.store.responses, batch, behind, position)
    await client.write(part + b']},"success":true,"errors":[],"messages":[]}')
    await client.end_stream()


class _Asked:
    """A request about batches or files, with its owner."""

    def __init__(self, queue: BatchQueue, client: Downstream, body: bytes) -> None:
        head = client.head
        found = _PATH.match(head.path) or _RUN.match(head.path)
        assert found is not None, "service_table.py has looked"
        self._found = found.groupdict()
        self.ignored: list[str] = []  # fields without a meaning here
        self._queue = queue
        self._head = head
        self._body = body
        holder = head.holder
        self._key = "" if holder is None else holder.name
        owner = owner_of(head.header("authorization"), "" if holder is None else holder.account.name)
        self._owner = tenant_of(owner, self._found["account"]).id
        query = parse_qs(head.target.partition("?")[2])
        self._query = {name: values[-1] for name, values in query.items()}

    async def answer(self) -> Fields | StoredFile | StoredBatch:
        """Return the response's fields, or the file or the batch to send. Raises ApiError."""
        method = self._head.method
        if "model" in self._found:
            return await self._run()
        match method, self._found["what"], self._found["id"], self._found["verb"]:
            case "POST", "files", None, None:
                return await self._upload()
            case "GET", "files", None, None:
                files = await self._queue.do(self._queue.store.files, self._owner)
                wanted = self._query.get("purpose")
                return await self._page([file for file in files if wanted in (None, file.purpose)], file_fields)
            case (("GET" | "DELETE"), "files", str(name), (None | "content") as verb):
                return await self._file(name, method, verb)
            case "POST", "batches", None, None:
                return await self._create()
            case "GET", "batches", None, None:
                batches = await self._queue.do(self._queue.store.batches, self._owner)
                return await self._page(batches, lambda each: batch_fields(each, self._queue.store.counts(each)))
            case "GET", "batches", str(name), None:
                return batch_fields(*await self._queue.do(self._queue.store.batch, name, self._owner))
            case "POST", "batches", str(name), "cancel":
                return await self._cancel(name)
        raise ApiError("method_not_allowed", f"{self._head.path[:200]} does not take {method}")

    async def _upload(self) -> Fields:
        async def body() -> AsyncGenerator[bytes, None]:
            yield self._body

        form = await read_form(self._head.header("content-type"), body())
        try:
            file, purpose = file_in(form), form.get("purpose")
            if not isinstance(purpose, str) or purpose.strip() != INPUT:
                sentence = "the form's field purpose must be batch: files are stored for batches only"
                raise ApiError("invalid_request", sentence, param="purpose")
            keep_s = _lifetime(
                {name: form[f"{EXPIRES}[{name}]"] for name in ANCHORED if f"{EXPIRES}[{name}]" in form}, EXPIRES
            )
            self.ignored += [name for name in form if name not in FORM_FIELDS]
            name, content = (file.filename or "")[:256], await file.read()
        finally:
            await form.close()
        queue = self._queue
        return file_fields(await queue.do(queue.store.add_file, self._owner, name, INPUT, content, queue.now_s, keep_s))

    async def _file(self, name: str, method: str, verb: str | None) -> Fields | StoredFile:
        queue = self._queue
        file = await queue.do(queue.store.file, name, self._owner)
        if method == "GET":
            return file_fields(file) if verb is None else file
        if verb is not None:
            raise ApiError("method_not_allowed", f"{self._head.path[:200]} does not take {method}")
        await queue.do(queue.store.delete_file, file)
        return {"id": name, "object": "file", "deleted": True}

    async def _create(self) -> Fields:
        queue = self._queue
        fields = await queue.do(read_object, self._body)
        endpoint, name, metadata = fields.get("endpoint"), fields.get("input_file_id"), fields.get("metadata")
        if endpoint not in ENDPOINTS:
            raise ApiError("invalid_request", f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint")
        if fields.get("completion_window") != "24h":
            raise ApiError("invalid_request", "completion_window must be 24h", param="completion_window")
        if not isinstance(name, str):
            raise ApiError("invalid_request", "input_file_id must name a file", param="input_file_id")
        _check_metadata(metadata)
        if _lifetime(fields.get(OUTPUT_EXPIRES) or {}, OUTPUT_EXPIRES) != KEPT_S:
            sentence = f"{OUTPUT_EXPIRES}: answers of a batch are kept for {KEPT_S} s after its end: delete its files to remove them sooner"
            raise ApiError("unsupported_parameter", sentence, param=OUTPUT_EXPIRES)
        self.ignored += [name for name, value in fields.items() if value is not None and name not in BATCH_FIELDS]
        file = await queue.do(queue.store.file, name, self._owner)
        if file.purpose != INPUT:
            raise ApiError(
                "invalid_request", "input_file_id names an output file of another batch", param="input_file_id"
            )
        content = await queue.do(queue.store.content, file)
        lines, faults = await queue.do(read_lines, content, endpoint)
        batch = self._batch(f"batch_{secrets.token_hex(12)}", self._found["before"] + endpoint, name)
        batch = batch._replace(metadata=None if metadata is None else orjson.dumps(metadata).decode())
        if faults:
            batch, lines = batch._replace(ended_s=queue.now_s, faults=orjson.dumps(faults).decode()), []
        return batch_fields(*await self._add(batch, lines))

    def _batch(self, name: str, path: str, file: str) -> StoredBatch:
        now_s = self._queue.now_s
        return StoredBatch(name, self._owner, self._key, path, file, now_s, now_s + WITHIN_S)

    async def _add(self, batch: StoredBatch, lines: list[AskedLine]) -> tuple[StoredBatch, BatchCounts]:
        queue = self._queue
        await queue.do(queue.store.add, batch, lines)
        queue.added(self._owner, {line.model for line in lines})
        return await queue.do(queue.store.batch, batch.id, self._owner)

    async def _cancel(self, name: str) -> Fields:
        queue = self._queue
        batch, _ = await queue.do(queue.store.batch, name, self._owner)
        if batch.ended_s is not None:
            raise ApiError("conflict", "the batch has ended already")
        await queue.do(queue.store.cancel, batch, queue.under_way, queue.now_s)
        return batch_fields(*await queue.do(queue.store.batch, name, self._owner))

    async def _run(self) -> Fields | StoredBatch:
        """Answer a Workers AI body: `requests` starts a batch, `request_id` reads its answers."""
        queue, model = self._queue, self._found["model"]
        fields = await queue.do(read_object, self._body)
        name = fields.get("request_id")
        if name is None:
            lines = await queue.do(read_queued, fields, model)
            batch = self._batch(secrets.token_hex(16), self._head.path, "")
            await self._add(batch, lines)
            return _enveloped({"status": "queued", "request_id": batch.id, "model": model})
        if not isinstance(name, str):
            raise ApiError("invalid_request", "request_id must be a text", param="request_id")
        batch, counts = await queue.do(queue.store.batch, name, self._owner)
        if counts.waiting:
            started = sum(counts) > counts.waiting
            return _enveloped({"status": "running" if started else "queued", "request_id": name, "model": model})
        return batch

    async def _page(self, items: list[Item], tell: Callable[[Item], Fields]) -> Fields:
        """Return a page of a list. Each item is converted in the store's thread."""
        after, limit = self._query.get("after"), self._query.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and len(limit) <= 6 and 1 <= int(limit) <= 10_000):
            raise ApiError("invalid_request", "limit must be a number from 1 to 10000", param="limit")
        if after is not None:
            ids = [item.id for item in items]
            if after not in ids:
                raise ApiError("invalid_request", f"after: there is no {after[:100]!r}", param="after")
            items = items[ids.index(after) + 1 :]
        chosen = items[: min(self._queue.store.limits.num_listed, int(limit))]
        data = await self._queue.do(lambda: [tell(item) for item in chosen])
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": len(items) > len(data)}


def _lifetime(asked: object, param: str) -> int:
    """Return the requested lifetime of a file in seconds. Raises ApiError."""
    if asked == {}:
        return KEPT_S
    anchor, seconds = (asked.get("anchor"), asked.get("seconds")) if isinstance(asked, dict) else (None, None)
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit():  # a number as text, as in a form
        seconds = int(seconds[:10])
    if anchor != "created_at" or type(seconds) is not int or not LEAST_KEPT_S <= seconds <= KEPT_S:
        sentence = f'{param} must have the anchor "created_at" and from {LEAST_KEPT_S} to {KEPT_S} seconds, for which files are kept here'
        raise ApiError("invalid_request", sentence, param=param)
    return seconds


def _check_metadata(metadata: object) -> None:
    if metadata is None:
        return
    if (
        not isinstance(metadata, dict)
        or len(metadata) > MOST_METADATA
        or not all(isinstance(value, str) and len(name) <= 64 and len(value) <= 512 for name, value in metadata.items())
    ):
        sentence = f"metadata must be up to {MOST_METADATA} texts of 512 characters, with names of 64"
        raise ApiError("invalid_request", sentence, param="metadata")


def _enveloped(result: Fields) -> Fields:
    return {"result": result, "success": True, "errors": [], "messages": []}
