"""A prompt that one engine host computes and another one continues: the sequence of each, and what the first is known to have found.

The first computes all that the other can fetch, which is every full block before the prompt's last token; its own token is nobody's. The other waits
for those blocks, computes the rest and makes the answer: it is the sequence as it was asked for. Refuses to know who chooses the hosts (dispatch.py).
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from engine.client import EngineClient, EngineError
from engine.protocol import BlockSource, SamplingParams, Submit, TokenOutput
from runtime.engines.model_state import Replica

if TYPE_CHECKING:
    from runtime.engines.dispatch import Assignment

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


def decode_sequence(submit: Submit, prefill: Submit, address: str, within_s: float) -> Submit:
    """Return the sequence that fetches what another host computes, which serves its blocks at `address`."""
    return replace(submit, fetch_from=BlockSource(address, prefill.sequence_id, within_s))


class PrefillWork:
    """A prompt's computation for another host, while it is open."""

    def __init__(self) -> None:
        self._num_cached_tokens: int | None = None  # as the host has found it; None: it has not said
        self._device_us = 0  # of that host, not told yet
        self._replica: Replica | None = None  # None: no other host computes it

    @asynccontextmanager
    async def running(
        self, client: EngineClient, submit: Submit, assigned: "AbstractContextManager[Assignment]"
    ) -> AsyncIterator[None]:
        """Open the scope of the computation, which has been submitted by then. Leaving it aborts what has not ended. Whatever fails there, the host
        that waits computes by itself."""
        begun = asyncio.Event()
        task = asyncio.create_task(self._run(client, submit, assigned, begun), name="prefill")
        try:
            await begun.wait()
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    def as_found(self, output: TokenOutput) -> TokenOutput:
        """Return an answer's first output with the other host's time, and with what nobody had to compute for it as cached: what the host that
        answers fetched, the other may have computed. Where that one has not ended by then, it was waited for in vain."""
        if output.num_cached_tokens is None:
            return output
        if self._replica is not None and self._num_cached_tokens is None:
            self._replica.late_at = time.monotonic()
        device_us = output.device_us + self._device_us
        if not output.num_fetched_tokens:
            return replace(output, device_us=device_us)
        of_its_own = output.num_cached_tokens - output.num_fetched_tokens
        found = min(output.num_cached_tokens, self._num_cached_tokens or 0)
        return replace(output, num_cached_tokens=max(of_its_own, found), device_us=device_us)

    async def _run(
        self,
        client: EngineClient,
        submit: Submit,
        assigned: "AbstractContextManager[Assignment]",
        begun: asyncio.Event,
    ) -> None:
        try:
            with suppress(EngineError), assigned as assignment, assignment.replica.host.progress.expected():
                self._replica = assignment.replica
                async with client.generate(submit) as outputs:
                    begun.set()
                    async for output in outputs:
                        assignment.note(output.token_ids)
                        self._device_us += output.device_us
                        if output.num_cached_tokens is not None:
                            self._num_cached_tokens = output.num_cached_tokens
        finally:
            begun.set()
