"""Lending: compute prompts for other sites of the network, on hosts that have no work of this site.

A host takes a few at a time, so that a burst of prompts of a slow site can be lent. Lent prompts are aborted as soon as a request of this site
arrives, so the request waits at most for the current step. The other site then computes the rest of its prompts itself.
api/routes/lending_routes.py has the HTTP side, and engine/kv/peers sends the blocks.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal, NamedTuple

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import PRIORITIES, SamplingParams, Submit, TokenOutput
from pilotlight.runtime.dispatch.assignments import PREFILL_TOKENS_PER_S, Assignments
from pilotlight.runtime.generation.admission import Admission
from pilotlight.runtime.models.model_state import ModelState, Replica
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.lending import BorrowedPrompt, Lendable

MOST_PROMPTS = 8  # prompts of other sites on one host, computed one after the other; more would mean long waits
WATCH_EVERY_S = 0.02  # interval of looking for requests of this site; a step of a long prompt takes longer

Outcome = Literal["computed", "declined", "given_up", "left", "failed"]
Observer = Callable[[str, Outcome], None]  # (model, outcome of another site's prompt)


class LentPrompt(NamedTuple):
    """A prompt in progress for another site."""

    host: int  # index of the host that computes it and serves its blocks
    outputs: AsyncIterator[TokenOutput]


class Lending:
    def __init__(
        self, states: dict[str, ModelState], assignments: Assignments, admission: Admission, observe: Observer
    ) -> None:
        self._states = states
        self._assignments = assignments
        self._admission = admission
        self._observe = observe
        self._lent: defaultdict[int, list[float]] = defaultdict(
            list
        )  # host -> predicted seconds of each of its lent prompts

    def lendable(self) -> Lendable:
        if self._admission.draining:
            return Lendable({}, "it is shutting down")
        idle = {name: replica for name, state in self._states.items() if (replica := self._idle(state)) is not None}
        rates = {name: replica.load.prefill_tokens_per_s for name, replica in idle.items()}
        queue_s = min((sum(self._lent[replica.host.index]) for replica in idle.values()), default=0.0)
        return Lendable(rates, "" if rates else "its hosts are busy, or have no model awake", queue_s)

    @asynccontextmanager
    async def lend(self, prompt: BorrowedPrompt) -> AsyncIterator[LentPrompt]:
        """Open the scope of a prompt's computation.

        Raises ApiError if the site does not lend, or if it stops lending before the end.
        """
        name = prompt.model if prompt.model in self._states else "unknown"  # limits the number of metric labels
        state = self._states.get(prompt.model)
        replica = None if state is None else self._idle(state)
        if replica is None:
            self._observe(name, "declined")
            raise ApiError("overloaded", "no idle host of this site has the model awake")
        outcome: Outcome = "failed"
        seconds = len(prompt.token_ids) / (replica.load.prefill_tokens_per_s or PREFILL_TOKENS_PER_S)
        self._lent[replica.host.index].append(seconds)
        try:
            async with AsyncExitStack() as scope:
                scope.enter_context(self._admission.permit())
                until = await scope.enter_async_context(asyncio.timeout(None))
                await scope.enter_async_context(self._watched(replica, until))
                scope.enter_context(replica.host.progress.expected())
                client = replica.host.serving_client()
                outputs = await scope.enter_async_context(client.generate(_as_submit(prompt)))
                yield LentPrompt(replica.host.index, outputs)
            outcome = "computed"
        except TimeoutError:
            outcome = "given_up"
            raise ApiError("overloaded", "requests of this site arrived meanwhile") from None
        except asyncio.CancelledError:
            outcome = "left"  # the other site ended its request
            raise
        except EngineError as error:
            raise ApiError(error.code, str(error)) from None
        except ApiError:
            outcome = "declined"
            raise
        finally:
            self._lent[replica.host.index].remove(seconds)
            self._observe(name, outcome)

    def _idle(self, state: ModelState) -> Replica | None:
        """Return an awake replica on a host for prompts without work of this site, with the fewest lent ones.

        Returns None if there is none."""
        able = [
            replica
            for replica in state.awake
            if replica.is_live and replica.takes_prompts and replica.host.role != "decode" and not replica.is_retiring
        ]
        idle = [
            replica
            for replica in able
            if len(self._lent[replica.host.index]) < MOST_PROMPTS and not self._assignments.num_open(replica)
        ]
        return min(idle, key=lambda replica: len(self._lent[replica.host.index]), default=None)

    @asynccontextmanager
    async def _watched(self, replica: Replica, until: asyncio.Timeout) -> AsyncIterator[None]:
        """End the scope `until` as soon as this site has a request for the host, or shuts down."""

        async def watch() -> None:
            while not (self._assignments.num_open(replica) or self._admission.draining):
                await asyncio.sleep(WATCH_EVERY_S)
            until.reschedule(asyncio.get_running_loop().time())

        task = asyncio.create_task(watch(), name="lent prompt")
        try:
            yield
        finally:
            task.cancel()


def _as_submit(prompt: BorrowedPrompt) -> Submit:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    priority = PRIORITIES[-1]
    return Submit(
        prompt.hand_over, prompt.model, prompt.token_ids, sampling, prompt.salt, priority=priority, hands_over=True
    )
