"""Failover of sequences between engine hosts: those of a dead host are submitted to the next host.

They keep the tokens that they have. A sampled token depends on (logits, params, seed, position) alone, so the reader of a sequence gets one unbroken
row of outputs and does not notice the change. A sequence that cannot be continued soon, or that has crashed too many hosts (charges.py), ends with an
error. Independent of text and HTTP.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal, TypeVar

from msgspec.structs import replace

from pilotlight.engine.api.client import EngineClient, EngineError
from pilotlight.engine.api.protocol import Submit, TokenOutput
from pilotlight.runtime.dispatch.assignments import Assignment
from pilotlight.runtime.dispatch.charges import Charges
from pilotlight.runtime.dispatch.dispatcher import Dispatch, Placement
from pilotlight.runtime.dispatch.hand_over import PrefillWork
from pilotlight.runtime.dispatch.sent_images import SentImages
from pilotlight.runtime.dispatch.sequences import prefill_sequence, remaining
from pilotlight.runtime.hosts.device_host import HostHandle
from pilotlight.runtime.hosts.fleet import Fleet
from pilotlight.support.time_limits import TimeLimit

T = TypeVar("T")
RESTART_FACTOR = 3  # a start may take this many times as long as any before, because the machine may be busier
LONGEST_RESTART_S = 60.0  # a longer start is not waited for
Outcome = Literal["continued", "failed"]
Observer = Callable[[str, Outcome], None]  # (model, outcome of a sequence whose host died)
PlacementObserver = Callable[[str, str], None]  # (model, "here" or "handed_over"), if there was a choice of hosts


class Continuations:
    """Opens sequences on whichever hosts the site has."""

    def __init__(
        self,
        fleet: Fleet,
        dispatch: Dispatch,
        within_s: float,
        observe: Observer,
        observe_placement: PlacementObserver = lambda model, where: None,
    ) -> None:
        """Continue sequences on the hosts of a site.

        `within_s` limits, after each death of a host, the seconds until the sequence is open on the next one; the limit is longer where hosts start
        more slowly. From then on the deadline of a step applies.
        """
        self.fleet = fleet
        self.dispatch = dispatch
        self.within_s = within_s
        self.observe = observe
        self.observe_placement = observe_placement
        self.images = SentImages()
        self.charges = Charges()

    @asynccontextmanager
    async def generate(self, submit: Submit) -> AsyncIterator["ContinuedSequence"]:
        """Open the scope of a sequence, which stays open when the sequence moves to another host.

        Leaving the scope aborts the sequence unless it has ended.
        """
        sequence = ContinuedSequence(self, submit)
        try:
            await sequence.begin()
            yield sequence
        finally:
            await sequence.scope.aclose()


class _TooLateError(EngineError):
    """No host was available in time. It ends the sequence, which waits for no other host."""


class ContinuedSequence:
    """One sequence's outputs in order, for its reader."""

    def __init__(self, site: Continuations, submit: Submit) -> None:
        self._site = site
        self._submit = submit  # the sequence as the caller requested it
        self._since_s = time.monotonic() - submit.waited_s
        self._delivered: list[int] = []
        self._has_started = False
        # True if a host crashed in a step with this sequence, and no host has produced a token of it since.
        self._is_suspect = False
        self._client: EngineClient | None = None
        self._device_host: HostHandle | None = None  # the host that `_client` talks to
        self._assignment: Assignment | None = None
        self._prefill: PrefillWork | None = None  # the prompt's computation on another host; None if there is none
        self.route = ""  # how it was first placed (Placement.explained)
        self.scope = AsyncExitStack()  # scope of the sequence on its present host

    async def begin(self) -> None:
        """Open the sequence on a host; wait for the next host if none has its model."""
        self._site.charges.require_harmless(self._submit)
        self._is_suspect = self._site.charges.of(self._submit) > 0
        try:
            self.route = await self._in_time(self._begin)
        except _TooLateError as late:
            why = self._site.fleet.why_down or "its engine host died"
            raise EngineError("overloaded", f"{why}, and no other was ready {late}; try again in a moment") from None

    async def _in_time(self, enter: Callable[[], Awaitable[T]]) -> T:
        """Await `enter`, which opens the sequence on a host.

        If a further host dies meanwhile, the wait begins again. Raises _TooLateError after a wait that is longer than the site's limit, and longer
        than a host's start is expected to take.
        """
        site, since = self._site, time.monotonic()
        within_s = site.within_s
        while True:
            try:
                async with TimeLimit(within_s):
                    return await enter()
            except TimeoutError:
                restart_s = RESTART_FACTOR * site.dispatch.expected_restart_s(self._submit.model)
                limit_s = max(site.within_s, min(restart_s, LONGEST_RESTART_S))
                left_s = limit_s - (time.monotonic() - max(since, site.fleet.died_at))
                if left_s <= 0.0:
                    raise _TooLateError("engine_error", f"within {limit_s:.3g} s") from None
                within_s = left_s
            await self.scope.aclose()

    async def _begin(self) -> str:
        while True:
            placement = await self._site.dispatch.place(self._submit)
            try:
                return await self._enter(placement, self._submit)
            except EngineError as error:  # this host may have died while another host was asked to compute the prompt
                if self._client is None or not self._is_cut(error):
                    raise
            await self.scope.aclose()

    def __aiter__(self) -> AsyncIterator[TokenOutput]:
        return self

    async def __anext__(self) -> TokenOutput:
        try:
            output = await anext(self._outputs)
        except EngineError as error:
            if not self._is_cut(error):
                raise
            output = await self._continue(error)
        return self._note(output)

    def _is_cut(self, error: EngineError) -> bool:
        """Return whether the host died, not merely this sequence.

        False while the site shuts down: its streams end with it."""
        assert self._client is not None
        return error.code == "engine_error" and self._client.death is not None and not self._site.fleet.is_ending

    async def _continue(self, error: EngineError) -> TokenOutput:
        """Return the first output of a host that lives long enough to make one."""
        try:
            while True:
                await self._note_death(error)
                try:
                    await self._move(error)
                    output = await anext(self._outputs)
                    break
                except _TooLateError:
                    raise
                except EngineError as again:
                    if not self._is_cut(again):
                        raise
                    error = again
        except BaseException as failure:
            if isinstance(failure, Exception):  # otherwise the reader has left
                self._site.observe(self._submit.model, "failed")
            raise
        self._site.observe(self._submit.model, "continued")
        return output

    async def _note_death(self, error: EngineError) -> None:
        """Charge the request if its host ended by itself in a step of this sequence.

        Raises EngineError after too many charges.
        """
        assert self._client is not None
        assert self._device_host is not None
        if self._submit.sequence_id not in (await self._device_host.end_of(self._client)).charged:
            return
        self._site.charges.charge(self._submit)
        self._site.charges.require_harmless(self._submit, str(error))
        self._is_suspect = True

    async def _move(self, error: EngineError) -> None:
        """Move to a host that has the model: at once if there is one, otherwise when the model has woken.

        Raises EngineError if none takes the sequence in time.
        """

        async def enter() -> None:
            await self.scope.aclose()
            placement = await self._site.dispatch.place(self._submit)
            rest = remaining(self._submit, self._delivered) if self._has_started else self._submit
            await self._enter(placement, rest)

        try:
            await self._in_time(enter)
        except _TooLateError as late:
            message = f"{error}; the answer could not be continued on another host {late}"
            raise _TooLateError("engine_error", message) from None

    async def _enter(self, placement: Placement, submit: Submit) -> str:
        """Open the sequence on its host; return the decision as a header's text (`Placement.explained`)."""
        self._device_host = placement.replica.host
        if self._client is not None:  # its host is lost
            submit = replace(submit, waited_s=time.monotonic() - self._since_s)
        self._client = client = self._device_host.serving_client()
        self.scope = AsyncExitStack()
        self._prefill = None
        if self._is_suspect:  # the host that answers computes its prompt as well
            placement, submit = placement._replace(prefill=None), replace(submit, is_suspect=True)
        if placement.prefill is not None:
            placement, submit = await self._begin_prefill(placement, submit)
        if placement.why:
            self._site.observe_placement(submit.model, "here" if placement.prefill is None else "handed_over")
        self._assignment = self.scope.enter_context(self._site.dispatch.assignments.assigned(submit, placement.replica))
        self.scope.enter_context(placement.replica.host.progress.expected())
        opened = self._site.images.generate(client, submit) if submit.images else client.generate(submit)
        self._outputs = await self.scope.enter_async_context(opened)
        return placement.explained

    async def _begin_prefill(self, placement: Placement, submit: Submit) -> tuple[Placement, Submit]:
        """Have another host compute the prompt, and return the sequence that fetches its blocks.

        If that host has just gone or declines, the sequence is returned unchanged.
        """
        info = self._site.dispatch.states[submit.model].info
        assert placement.prefill is not None
        assert info is not None, "a model that is awake was loaded"
        prefill = prefill_sequence(submit, info.block_size)
        work = PrefillWork(placement.prefill, self._site.dispatch.assignments)
        fetching = await self.scope.enter_async_context(work.running(submit, prefill, placement.within_s))
        if fetching is None:
            return placement.without_prefill(), submit
        self._prefill = work
        return placement, fetching

    def _note(self, output: TokenOutput) -> TokenOutput:
        """Count an output's tokens.

        Cached tokens are those that the first host found, even if the next host computes them again.
        """
        if self._prefill is not None:
            output = self._prefill.as_found(output)
        self._delivered += output.token_ids
        assert self._assignment is not None, "outputs come from the replica it is assigned to"
        self._assignment.note(output.token_ids)
        if self._has_started and output.num_cached_tokens is not None:
            output = replace(output, num_cached_tokens=None)
        self._has_started = self._has_started or bool(output.token_ids)
        if output.token_ids:
            # A host has computed the prompt without a crash. Charges against the prompt stay until the answer ends.
            self._is_suspect = False
        if output.finish_reason in ("stop", "length"):
            self._site.charges.clear(self._submit)
        return output
