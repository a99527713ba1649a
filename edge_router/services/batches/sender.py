"""Requests of batches, each repeated until it has an answer or its batch's time ends.

They take the normal path: a request continues elsewhere when a site dies, has its account's models, quotas and data rules, and is billed. Its usage
record has the request's own name as its id: if the router is killed before it stores the answer, the request is sent again and billed once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import orjson

from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.requests.request import Head
from pilotlight.edge_router.services.batches.batch_store import StoredBatch, WaitingRequest
from pilotlight.wire.credentials import Access, Key
from pilotlight.wire.errors import ApiError

TRIES_OF_ERRORS = 3  # attempts of a request if sites fail
LONGEST_WAIT_S = 60.0
TRY_LATER = (429, 502, 503)  # statuses that are not the request's fault: it is tried again until the batch's time ends
FAILED = (408, 500, 504)


class BatchSender:
    def __init__(
        self,
        proxy: Proxy,
        access: Access,
        first_wait_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`first_wait_s` is the pause before a request's second attempt, doubled before each later one.

        `clock` returns seconds since the epoch.
        """
        self._proxy = proxy
        self._access = access
        self._first_wait_s = first_wait_s
        self._clock = clock
        self._sleep = sleep

    async def ask(self, request: WaitingRequest) -> tuple[int, bytes]:
        """Return the network's answer; repeat a failed request until the batch's time ends.
        Raises TimeoutError."""
        num_errors, wait_s = 0, self._first_wait_s
        async with asyncio.timeout(max(0.0, request.batch.expires_s - self._clock())):
            while True:
                answer = BatchAnswer(self._head(request.batch), f"{request.batch.id}.{request.number}")
                answer.head.usage_id = answer.request_id
                try:
                    answer.head.hold(self._holder(request.batch))
                except ApiError as error:
                    await answer.refuse(error)
                else:
                    await self._proxy.handle(answer, self._proxy.forward(answer, request.body))
                status = answer.status
                num_errors += status in FAILED
                if status not in TRY_LATER and (status not in FAILED or num_errors == TRIES_OF_ERRORS):
                    return status, answer.body
                await self._sleep(max(wait_s, answer.retry_after_s))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _head(self, batch: StoredBatch) -> Head:
        headers = [("content-type", "application/json")]
        if not batch.key and not batch.owner.startswith("anonymous"):
            # The token of an unknown key is not stored; this substitute gives its owner a separate prefix cache.
            headers.append(("authorization", f"Bearer batches-of-{batch.owner}"))
        head = Head("POST", batch.path, quote(batch.path, safe="/:@!$&'()*+,;=~"), headers)
        head.is_for_batch = True
        return head

    def _holder(self, batch: StoredBatch) -> Key | None:
        """Return the key that created the batch, with its current rights; None if it was an unknown one.
        Raises ApiError if the key was deleted or has no right to models, or if unknown keys are no longer accepted."""
        if not batch.key:
            return self._access.key(None, "models") if self._access.is_required else None
        key = next((key for key in self._access.keys.values() if key.name == batch.key), None)
        if key is None:
            raise ApiError("unauthorized", f"the key {batch.key}, which created the batch, no longer exists")
        key.check("models", self._clock())
        return key


class BatchAnswer:
    """A request of a batch. To the proxy it is a client that never leaves; it stores its answer."""

    address = ""
    is_streaming = False  # a streamed request is refused when its batch is made

    def __init__(self, head: Head, request_id: str) -> None:
        self.head = head
        self.request_id = request_id
        self.status = 500  # 500 until there is an answer
        self.body = b""
        self.retry_after_s = 0.0
        self._task = asyncio.current_task()

    async def respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status, self.body = status, body

    async def refuse(self, error: ApiError) -> None:
        self.retry_after_s = error.retry_after_s or 0.0
        await self.respond(error.status(self.head.dialect), [], orjson.dumps(error.body(self.head.dialect)))

    async def start_stream(self, status: int, headers: list[tuple[str, str]]) -> None:
        raise ApiError("internal_error", "a site answered a request of a batch with a stream")

    async def write(self, batch: bytes) -> None:
        raise AssertionError("no stream begins")

    def write_now(self, batch: bytes) -> bool:
        raise AssertionError("no stream begins")

    def note_last_event(self) -> None:
        raise AssertionError("no stream begins")

    async def end_stream(self) -> None:
        raise AssertionError("no stream begins")

    def cut(self, error: ApiError) -> None:
        """Stop the request because the router drains; the next router sends it again."""
        if self._task is not None:
            self._task.cancel()

    def look(self, now: float, awake_since: float) -> None:
        """Do nothing: a batch's request never waits for a reader."""
