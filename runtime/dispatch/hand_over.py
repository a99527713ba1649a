"""Hand-over of a prompt: one engine host computes it, another one fetches its blocks and answers.

The first host computes every full block before the prompt's last token; the token that it samples is discarded. The second host runs the client's own
sequence: it waits for the blocks and computes the rest. dispatcher.py chooses the hosts.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from msgspec.structs import replace

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import Submit, TokenOutput
from pilotlight.runtime.dispatch.assignments import Assignments
from pilotlight.runtime.dispatch.sequences import decode_sequence
from pilotlight.runtime.models.model_state import Replica
from pilotlight.support import background


class PrefillWork:
    """The computation of a prompt on one host for another host."""

    def __init__(self, replica: Replica, assignments: Assignments) -> None:
        """`replica` is on the host that computes."""
        self._replica = replica
        self._assignments = assignments
        self._num_cached_tokens: int | None = None  # cached tokens that the host has found; None until it reports them
        self._device_us = 0  # device time of the computing host, not yet added to an output of the client's sequence

    @asynccontextmanager
    async def running(self, submit: Submit, prefill: Submit, within_s: float) -> AsyncIterator[Submit | None]:
        """Open the scope of the computation; its value is the sequence that fetches the blocks.

        The value is None if the host is gone or declines. Leaving the scope aborts the computation. If it fails later, the waiting host computes the
        prompt.
        """
        started: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(prefill, started), name="prefill")
        try:
            address = await asyncio.shield(started)  # if the request ends now, `_run` still sets the result
            if address is None:
                yield None
            else:
                yield decode_sequence(submit, prefill, address, within_s)
        finally:
            await background.stop(task)

    def as_found(self, output: TokenOutput) -> TokenOutput:
        """Return an answer's first output with the prompt's real cost, and report the hand-over's result.

        Device time includes the other host's. A fetched token counts as cached only if the other host had it cached, too.
        """
        if output.num_cached_tokens is None:
            return output
        if self._num_cached_tokens is None:
            self._replica.late_at = time.monotonic()  # the host had not finished the prompt
        device_us = output.device_us + self._device_us
        if not output.num_fetched_tokens:
            return replace(output, device_us=device_us)
        of_its_own = output.num_cached_tokens - output.num_fetched_tokens
        found = min(output.num_cached_tokens, self._num_cached_tokens or 0)
        return replace(output, num_cached_tokens=max(of_its_own, found), device_us=device_us)

    async def _run(self, prefill: Submit, started: "asyncio.Future[str | None]") -> None:
        replica, host = self._replica, self._replica.host
        try:
            with suppress(EngineError):
                client, address = host.serving_client(), host.peer_address
                if address is None:  # the host serves no blocks
                    return
                with self._assignments.assigned(prefill, replica) as assignment, host.progress.expected():
                    async with client.generate(prefill) as outputs:
                        started.set_result(address)
                        async for output in outputs:
                            assignment.note(output.token_ids)
                            self._device_us += output.device_us
                            if output.num_cached_tokens is not None:
                                self._num_cached_tokens = output.num_cached_tokens
        finally:
            if not started.done():
                started.set_result(None)
