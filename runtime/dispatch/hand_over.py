"""A prompt that one engine host computes and another one continues: the sequence of each, and what the first is known to have found.

The first computes all that the other can fetch, which is every full block before the prompt's last token; its own token is nobody's. The other waits
for those blocks, computes the rest and makes the answer: it is the sequence as it was asked for. Refuses to know who chooses the hosts
(dispatcher.py).
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import BlockSource, SamplingParams, Submit, TokenOutput
from pilotlight.runtime.dispatch.assignments import Assignment
from pilotlight.runtime.models.model_state import Replica

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def can_hand_over(submit: Submit) -> bool:
    """Tell whether another host could compute the prompt: not where what is reported of its tokens is in no cache, nor where a leader computes it."""
    return submit.pooling is None and not submit.sampling.prompt_logprobs and submit.leader is None


def prefill_sequence(submit: Submit, block_size: int) -> Submit:
    """Return the sequence that computes a prompt's full blocks for another host: one token more, so that all of them can be found cached."""
    num_tokens = (len(submit.prompt_token_ids) - 1) // block_size * block_size + 1
    return Submit(
        os.urandom(16).hex(),
        submit.model,
        submit.prompt_token_ids[:num_tokens],
        _ONE_TOKEN,
        submit.salt,
        priority=submit.priority,
        hands_over=True,
        adapter=submit.adapter,
        images=tuple(image for image in submit.images if image.position < num_tokens),
    )


def decode_sequence(submit: Submit, prefill: Submit, address: str, within_s: float, *, is_lent: bool = False) -> Submit:
    """Return the sequence that fetches what another host computes, which serves its blocks at `address`."""
    return replace(submit, fetch_from=BlockSource(address, prefill.sequence_id, within_s, is_lent))


class PromptBegun(NamedTuple):
    """A prompt that a host computes for another one."""

    address: str  # where its blocks are served
    outputs: AsyncIterator[TokenOutput]


class PromptHost(Protocol):
    """A host that computes prompts for others: one of this site (OwnHost), or of a site that lends (lenders.py)."""

    @property
    def name(self) -> str: ...
    @property
    def is_lent(self) -> bool: ...
    def computing(self, prefill: Submit) -> AbstractAsyncContextManager[PromptBegun]:
        """Open the scope of a prompt's computation. Raises EngineError where the host is gone, or declines."""

    def note_found(self, first: TokenOutput, *, is_late: bool, is_lost: bool) -> None:
        """Note what came of a prompt's blocks, as the answer's first output tells.

        `is_late`: the prompt had not ended by then; `is_lost`: nothing came of what was not here."""


class OwnHost(NamedTuple):
    replica: Replica
    assigned: Callable[[Submit, Replica], AbstractContextManager[Assignment]]

    @property
    def name(self) -> str:
        return f"engine {self.replica.host.index}"

    @property
    def is_lent(self) -> bool:
        return False

    @asynccontextmanager
    async def computing(self, prefill: Submit) -> AsyncIterator[PromptBegun]:
        host = self.replica.host
        client, address = host.serving_client(), host.peer_address
        if address is None:
            raise EngineError("engine_error", f"{self.name} serves no blocks")
        with self.assigned(prefill, self.replica) as assignment, host.progress.expected():
            async with client.generate(prefill) as outputs:
                yield PromptBegun(address, _noted(outputs, assignment))

    def note_found(self, first: TokenOutput, *, is_late: bool, is_lost: bool) -> None:
        if is_late:
            self.replica.late_at = time.monotonic()


async def _noted(outputs: AsyncIterator[TokenOutput], assignment: Assignment) -> AsyncIterator[TokenOutput]:
    async for output in outputs:
        assignment.note(output.token_ids)
        yield output


class PrefillWork:
    """A prompt's computation for another host, while it is open."""

    def __init__(self, host: PromptHost) -> None:
        self._host = host
        self._num_cached_tokens: int | None = None  # as the host has found it; None: it has not said
        self._device_us = 0  # of that host, not told yet
        self._num_tokens = 0  # of the blocks that it computes

    @asynccontextmanager
    async def running(self, submit: Submit, prefill: Submit, within_s: float) -> AsyncIterator[Submit | None]:
        """Open the scope of the computation: its value is the sequence that fetches its blocks; None where the host is gone or declines. Leaving it
        aborts what has not ended. Whatever fails there later, the host that waits computes by itself."""
        self._num_tokens = len(prefill.prompt_token_ids) - 1
        begun: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(prefill, begun), name="prefill")
        try:
            address = await begun
            if address is None:
                yield None
            else:
                yield decode_sequence(submit, prefill, address, within_s, is_lent=self._host.is_lent)
        finally:
            task.cancel()
            await asyncio.wait({task})

    def as_found(self, output: TokenOutput) -> TokenOutput:
        """Return an answer's first output with the other host's time, and with what nobody had to compute for it as cached: what the host that
        answers fetched, the other may have computed. Where that one has not ended by then, it was waited for in vain."""
        if output.num_cached_tokens is None:
            return output
        is_lost = not output.num_fetched_tokens and output.num_cached_tokens < self._num_tokens
        self._host.note_found(output, is_late=self._num_cached_tokens is None, is_lost=is_lost)
        device_us = output.device_us + self._device_us
        if not output.num_fetched_tokens:
            return replace(output, device_us=device_us)
        of_its_own = output.num_cached_tokens - output.num_fetched_tokens
        found = min(output.num_cached_tokens, self._num_cached_tokens or 0)
        return replace(output, num_cached_tokens=max(of_its_own, found), device_us=device_us)

    async def _run(self, prefill: Submit, begun: "asyncio.Future[str | None]") -> None:
        try:
            with suppress(EngineError):
                async with self._host.computing(prefill) as (address, outputs):
                    begun.set_result(address)
                    async for output in outputs:
                        self._device_us += output.device_us
                        if output.num_cached_tokens is not None:
                            self._num_cached_tokens = output.num_cached_tokens
        finally:
            if not begun.done():
                begun.set_result(None)
