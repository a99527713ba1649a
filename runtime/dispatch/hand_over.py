"""Hand-over of a prompt: one engine host computes it, another one fetches its blocks and answers.

The first host computes every full block before the prompt's last token; the token that it samples is discarded. The second host runs the client's own
sequence: it waits for the blocks and computes the rest. dispatcher.py chooses the hosts.
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
    """Tell whether another host can compute the prompt.

    It cannot if the request needs results of prompt tokens, which blocks do not contain, or if another choice of the request computes the prompt.
    """
    return submit.pooling is None and not submit.sampling.prompt_logprobs and submit.leader is None


def prefill_sequence(submit: Submit, block_size: int) -> Submit:
    """Return the sequence that computes a prompt's full blocks for another host.

    Its prompt has one token more than these blocks, so that all full blocks can be found in the cache.
    """
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
    """Return the sequence that fetches the blocks of `prefill`, which are served at `address`."""
    return replace(submit, fetch_from=BlockSource(address, prefill.sequence_id, within_s, is_lent))


class StartedPrompt(NamedTuple):
    """A prompt's computation that a host has started for another one."""

    address: str  # address at which its blocks are served
    outputs: AsyncIterator[TokenOutput]


class PromptHost(Protocol):
    """A host that computes prompts for others: of this site (OwnHost) or of another one (lenders.py)."""

    @property
    def name(self) -> str: ...
    @property
    def is_lent(self) -> bool: ...
    def computing(self, prefill: Submit) -> AbstractAsyncContextManager[StartedPrompt]:
        """Open the scope of a prompt's computation. Raises EngineError if the host is gone or declines."""

    def note_found(self, first: TokenOutput, *, is_late: bool, is_lost: bool, overrun: float) -> None:
        """Record how a prompt's blocks were used; `first` is the answer's first output.

        `is_late`: this host had not finished the prompt when the first output came. `is_lost`: the answering host lacked blocks and fetched none.
        `overrun`: seconds until the first output, divided by those that were predicted.
        """


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
    async def computing(self, prefill: Submit) -> AsyncIterator[StartedPrompt]:
        host = self.replica.host
        client, address = host.serving_client(), host.peer_address
        if address is None:
            raise EngineError("engine_error", f"{self.name} serves no blocks")
        with self.assigned(prefill, self.replica) as assignment, host.progress.expected():
            async with client.generate(prefill) as outputs:
                yield StartedPrompt(address, _noted(outputs, assignment))

    def note_found(self, first: TokenOutput, *, is_late: bool, is_lost: bool, overrun: float) -> None:
        if is_late:
            self.replica.late_at = time.monotonic()


async def _noted(outputs: AsyncIterator[TokenOutput], assignment: Assignment) -> AsyncIterator[TokenOutput]:
    async for output in outputs:
        assignment.note(output.token_ids)
        yield output


class PrefillWork:
    """The computation of a prompt on one host for another host."""

    def __init__(self, host: PromptHost, predicted_s: float) -> None:
        self._host = host
        self._predicted_s = predicted_s
        self._began = time.monotonic()
        self._num_cached_tokens: int | None = None  # cached tokens that the host has found; None until it reports them
        self._device_us = 0  # device time of the computing host, not yet added to an output of the client's sequence
        self._num_tokens = 0  # number of tokens in the blocks that it computes

    @asynccontextmanager
    async def running(self, submit: Submit, prefill: Submit, within_s: float) -> AsyncIterator[Submit | None]:
        """Open the scope of the computation; its value is the sequence that fetches the blocks.

        The value is None if the host is gone or declines. Leaving the scope aborts the computation. If it fails later, the waiting host computes the
        prompt.
        """
        self._num_tokens = len(prefill.prompt_token_ids) - 1
        started: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(prefill, started), name="prefill")
        try:
            address = await started
            if address is None:
                yield None
            else:
                yield decode_sequence(submit, prefill, address, within_s, is_lent=self._host.is_lent)
        finally:
            task.cancel()
            await asyncio.wait({task})

    def as_found(self, output: TokenOutput) -> TokenOutput:
        """Return an answer's first output with the prompt's real cost, and report the hand-over's result.

        Device time includes the other host's. A fetched token counts as cached only if the other host had it cached, too.
        """
        if output.num_cached_tokens is None:
            return output
        is_lost = not output.num_fetched_tokens and output.num_cached_tokens < self._num_tokens
        overrun = (time.monotonic() - self._began) / max(1e-3, self._predicted_s)
        self._host.note_found(output, is_late=self._num_cached_tokens is None, is_lost=is_lost, overrun=overrun)
        device_us = output.device_us + self._device_us
        if not output.num_fetched_tokens:
            return replace(output, device_us=device_us)
        of_its_own = output.num_cached_tokens - output.num_fetched_tokens
        found = min(output.num_cached_tokens, self._num_cached_tokens or 0)
        return replace(output, num_cached_tokens=max(of_its_own, found), device_us=device_us)

    async def _run(self, prefill: Submit, started: "asyncio.Future[str | None]") -> None:
        try:
            with suppress(EngineError):
                async with self._host.computing(prefill) as (address, outputs):
                    started.set_result(address)
                    async for output in outputs:
                        self._device_us += output.device_us
                        if output.num_cached_tokens is not None:
                            self._num_cached_tokens = output.num_cached_tokens
        finally:
            if not started.done():
                started.set_result(None)
