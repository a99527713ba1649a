"""The sites that may compute prompts for this one: their offers, distance, and measured link.

Each site is asked once a second for its offer; the request also measures the round trip. The link's rate is measured by the blocks that come over it,
or by a probe if there are none for a while. A probe underestimates fast links with long round trips, because a new connection starts slowly.
dispatcher.py chooses the site; the engine hosts copy the blocks.
"""

import asyncio
import logging
import math
import os
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import ModelInfo, Submit, TokenOutput
from pilotlight.engine.planning.hand_over import prompt_bytes
from pilotlight.runtime.dispatch.hand_over import StartedPrompt
from pilotlight.sites.site import LenderConfig
from pilotlight.support import background
from pilotlight.support.estimates import PredictionError
from pilotlight.wire.hop.data_sites import DataSites
from pilotlight.wire.hop.headers import HOP, REQUEST_ID, Hop, sign_hop
from pilotlight.wire.hop.lending import (
    LENDING_PATH,
    PROBE_BYTES,
    PROBE_PATH,
    PROMPT_PATH,
    BorrowedPrompt,
    Lendable,
    LentTerms,
    PromptAccepted,
    PromptComputed,
    decode_line,
)
from pilotlight.wire.hop.status import LenderStatus
from pilotlight.wire.http.certificate import client_context
from pilotlight.wire.http.client import CannotConnect, ConnectionLost, ConnectionPool, Origin, UpstreamConnection

log = logging.getLogger("pilotlight.engine")

LOOK_EVERY_S = 1.0
CONNECT_WITHIN_S = 2.0
ANSWER_WITHIN_S = 5.0  # limit of an offer or a probe; a probe that takes longer has measured enough
ACCEPT_WITHIN_S = 2.0  # limit until a prompt is accepted, because a client waits for it
PROBE_EVERY_S = 60.0  # interval of probes while no blocks arrive; they take 0.3 Mbit/s
BELIEVED_S = 600.0  # time in which a slower probe does not replace a rate that was measured by blocks
RTT_WEIGHT = 0.2  # weight of the newest measurement in the moving average
TYPICAL_TOKENS = (
    4096  # length of the prompts for which terms are published: blocks that windows have left are not moved
)
REST_S, LONGEST_REST_S = 10.0, 600.0  # pause after a prompt of which no block was fetched; doubles up to the longest
MOST_ANSWER_BYTES = 1 << 20

UNREACHABLE = (CannotConnect, ConnectionLost, TimeoutError, msgspec.DecodeError)


class LenderOffer(NamedTuple):
    """The predicted cost in seconds of a prompt at another site; infinite if it does not lend."""

    cost_s: float
    why: str  # predicted milliseconds, in total and for the link, or the reason for not lending
    pays: bool = False  # whether the prompt should be computed there


class MeasuredLink:
    """Measurements of the link to a site: round trip in seconds and rate in bytes/s."""

    def __init__(self) -> None:
        self.rtt_s = 0.0
        self.bytes_per_s = 0.0  # 0 if not measured yet
        self.measured_at = self._moved_at = -math.inf

    def note_round_trip(self, seconds: float) -> None:
        self.rtt_s += RTT_WEIGHT * (seconds - self.rtt_s) if self.rtt_s else seconds

    def note_blocks(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.measured_at = self._moved_at = time.monotonic()

    def doubt(self) -> None:
        """Require a new measurement; the old one is used until then."""
        self.measured_at = self._moved_at = -math.inf

    def note_probe(self, bytes_per_s: float) -> None:
        self.measured_at = now = time.monotonic()
        self.bytes_per_s = max(bytes_per_s, self.bytes_per_s) if now - self._moved_at < BELIEVED_S else bytes_per_s


class Lender:
    """One lending site, in the form of a host that computes prompts (`PromptHost` in hand_over.py)."""

    is_lent = True

    def __init__(self, config: LenderConfig, secret: str, tls: ssl.SSLContext) -> None:
        self.name = config.site
        self.link = MeasuredLink()
        self._error = PredictionError()
        self._open_tokens = 0  # of the prompts that it computes for this site
        self._open_tokens_then = 0  # the same, when its offer came
        self.num_borrowed = self.num_declined = 0
        self._secret = secret
        self._origin = Origin.of(config.url)
        self._pool = ConnectionPool(CONNECT_WITHIN_S, tls)
        self._lendable = Lendable({}, "it has not answered yet")
        self._rest_s, self._rests_until = 0.0, -math.inf

    def offer(
        self, submit: Submit, num_missing: int, info: ModelInfo, own_rate: float, here_s: float, queue_s: float
    ) -> LenderOffer:
        """Predict the cost of computing the prompt there and fetching its blocks.

        `num_missing` is the number of tokens that the answering host has not cached. `own_rate` is that host's prefill rate in tokens/s, also used if
        the other site's is unknown. The prompt would cost `here_s` on that host, of which it would wait `queue_s`.
        """
        why_not = self._why_not(submit.model)
        if submit.images or submit.adapter is not None:
            why_not = "prompts with images or an adapter are not lent"
        if why_not:
            # the other site's text is escaped for a response header
            return LenderOffer(math.inf, f"no ({ascii(why_not)[1:-1]})")
        num_tokens = len(submit.prompt_token_ids)
        terms = self._terms(info, num_tokens, self._lendable.models[submit.model] or own_rate)
        cost = terms.cost(num_tokens, num_missing)
        why = f"{1e3 * cost.total_s:.1f} (link {1e3 * cost.link_s:.1f} at {self.link.bytes_per_s * 8e-6:.1f} Mbit/s)"
        return LenderOffer(cost.total_s, why, terms.pays(cost, here_s, queue_s, own_rate))

    def _terms(self, info: ModelInfo, num_tokens: int, rate: float) -> LentTerms:
        """Return the terms for prompts of about `num_tokens`, which are computed at `rate` tokens/s."""
        num_bytes = prompt_bytes(info, num_tokens)
        return LentTerms(
            rate,
            queue_s=self._open_tokens / rate + max(0.0, self._lendable.queue_s - self._open_tokens_then / rate),
            rtt_s=self.link.rtt_s,
            link_tokens_per_s=self.link.bytes_per_s * num_tokens / num_bytes if num_bytes else 0.0,
            moving_tokens=self._open_tokens,  # the blocks of all prompts share the link
            error=self.error,
        )

    @property
    def error(self) -> float:
        """Return the error of predictions, as a share of them."""
        return self._error.share

    @asynccontextmanager
    async def computing(self, prefill: Submit) -> AsyncIterator[StartedPrompt]:
        """Open the scope of a prompt's computation there.

        Raises EngineError if the site declines or cannot be reached.
        """
        prompt = BorrowedPrompt(prefill.model, prefill.sequence_id, prefill.prompt_token_ids, prefill.salt)
        answer: _LenderAnswer | None = None
        self._open_tokens += len(prefill.prompt_token_ids)
        try:
            try:
                async with asyncio.timeout(ACCEPT_WITHIN_S):
                    answer = await self._ask("POST", PROMPT_PATH, msgspec.json.encode(prompt))
                    accepted = decode_line(await answer.line(), PromptAccepted)
            except (*UNREACHABLE, EngineError) as error:
                self.num_declined += 1
                self._lendable = Lendable({}, f"it declined: {error}" if str(error) else "it did not answer in time")
                raise EngineError("overloaded", f"{self.name} computes no prompt: {error}") from None
            self.num_borrowed += 1
            yield StartedPrompt(f"tcp://{self._origin.host}:{accepted.port}", _outputs(answer))
        finally:
            self._open_tokens -= len(prefill.prompt_token_ids)
            if answer is not None:
                self._pool.put_back(answer.connection)

    def note_found(self, first: TokenOutput, *, is_late: bool, is_lost: bool, overrun: float) -> None:
        self._error.note(overrun)
        if first.fetched_bytes_per_s:
            self.link.note_blocks(first.fetched_bytes_per_s)
        if not is_lost:
            self._rest_s = 0.0
            return
        self._rest_s = min(LONGEST_REST_S, 2 * self._rest_s or REST_S)
        self._rests_until = time.monotonic() + self._rest_s
        self.link.doubt()
        log.warning(
            "no block of a prompt that %s computed could be fetched: it gets no prompts for %g s",
            self.name,
            self._rest_s,
        )

    async def run(self) -> None:
        """Update the site's offer periodically, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_WITHIN_S):
                    await self._look()
                if time.monotonic() - self.link.measured_at > PROBE_EVERY_S:
                    await self._probe()
            except (*UNREACHABLE, EngineError) as error:
                self._lendable = Lendable({}, str(error) or f"it did not answer within {ANSWER_WITHIN_S:g} s")
            self._pool.sweep()
            await asyncio.sleep(LOOK_EVERY_S)

    def status(self, infos: Mapping[str, ModelInfo]) -> LenderStatus:
        """Return the lender's status; `infos` are those of the site's awake models, by name."""
        lent = {name: rate for name, rate in self._lendable.models.items() if rate and not self._why_not(name)}
        return LenderStatus(
            self.name,
            why_not=self._lendable.why_not,
            rtt_ms=round(1e3 * self.link.rtt_s, 3),
            mbit_per_s=round(self.link.bytes_per_s * 8e-6, 3),
            borrowed=self.num_borrowed,
            declined=self.num_declined,
            terms={
                name: self._terms(infos[name], TYPICAL_TOKENS, rate) for name, rate in lent.items() if name in infos
            },
        )

    def close(self) -> None:
        self._pool.close()

    def _why_not(self, model: str) -> str:
        """Return why prompts of the model cannot be lent now; "" if they can."""
        if model not in self._lendable.models:
            return self._lendable.why_not or "it lends none of this model now"
        if time.monotonic() < self._rests_until:
            return "no block of the last prompt arrived"
        return "" if self.link.bytes_per_s else "its link is not measured yet"

    async def _look(self) -> None:
        open_tokens = self._open_tokens
        answer = await self._ask("GET", LENDING_PATH)
        self._open_tokens_then = open_tokens
        self.link.note_round_trip(answer.waited_s)
        try:
            self._lendable = decode_line(await answer.rest(MOST_ANSWER_BYTES), Lendable)
        finally:
            self._pool.put_back(answer.connection)

    async def _probe(self) -> None:
        """Measure the rate in bytes/s at which the second half of the probe arrives."""
        answer = await self._ask("GET", PROBE_PATH)
        half_at = began = time.monotonic()
        num_bytes = num_late = 0
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                while chunk := await answer.connection.read():
                    num_bytes += len(chunk)
                    if num_bytes <= PROBE_BYTES // 2:
                        half_at = time.monotonic()
                    else:
                        num_late += len(chunk)
        except TimeoutError:
            self.link.note_probe(num_bytes / (time.monotonic() - began))
        else:
            self.link.note_probe(num_late / max(1e-6, time.monotonic() - half_at))
        finally:
            self._pool.put_back(answer.connection)

    async def _ask(self, method: str, path: str, body: bytes = b"") -> "_LenderAnswer":
        """Send a request and return its response, once the head has arrived.

        Raises EngineError for a refusal, and the errors of UNREACHABLE.
        """
        kept = self._pool.idle(self._origin)
        if kept is not None:
            try:
                return await self._sent(kept, method, path, body)
            except ConnectionLost:
                if not kept.response.is_untouched:
                    raise
                # No byte of a response came, so the site had closed the idle connection: try again on a new one.
        return await self._sent(await self._pool.connect(self._origin), method, path, body)

    async def _sent(self, connection: UpstreamConnection, method: str, path: str, body: bytes) -> "_LenderAnswer":
        request_id = os.urandom(16).hex()
        signature = sign_hop(self._secret, time.time(), Hop(method, path, request_id, self.name), body)
        lines = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._origin.authority}\r\n{REQUEST_ID}: {request_id}\r\n"
            f"{HOP}: {signature}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        try:
            began = time.monotonic()
            connection.send(lines.encode("latin-1"), body)
            await connection.head()
            answer = _LenderAnswer(connection, time.monotonic() - began)
            if connection.response.status != 200:
                raise EngineError("overloaded", _message(await answer.rest(MOST_ANSWER_BYTES)))
        except BaseException:
            self._pool.put_back(connection)
            raise
        return answer


class _LenderAnswer:
    """A lender's response whose head has been read."""

    def __init__(self, connection: UpstreamConnection, waited_s: float) -> None:
        self.connection = connection
        self.waited_s = waited_s
        self._held = b""

    async def line(self) -> bytes:
        """Return the next line. Raises ConnectionLost."""
        while b"\n" not in self._held:
            chunk = await self.connection.read()
            if not chunk or len(self._held) > MOST_ANSWER_BYTES:
                raise ConnectionLost("it ended its response early")
            self._held += chunk
        line, _, self._held = self._held.partition(b"\n")
        return line

    async def rest(self, most: int) -> bytes:
        while chunk := await self.connection.read():
            self._held += chunk
            if len(self._held) > most:
                raise ConnectionLost(f"it answered more than {most} bytes")
        return self._held


async def _outputs(answer: _LenderAnswer) -> AsyncIterator[TokenOutput]:
    """Yield the single output that follows when the prompt is computed.
    Raises EngineError if it is missing."""
    try:
        computed = decode_line(await answer.line(), PromptComputed)
        await answer.rest(MOST_ANSWER_BYTES)
    except UNREACHABLE as error:
        raise EngineError("engine_error", str(error)) from None
    yield TokenOutput("", num_cached_tokens=computed.num_cached_tokens, device_us=computed.device_us)


class _RefusalSentence(msgspec.Struct):
    message: str


class _RefusalBody(msgspec.Struct):
    error: _RefusalSentence


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_RefusalBody).error.message[:200]
    except msgspec.DecodeError:
        return "it refused without a reason"


class Lenders:
    """All lenders in the site's file."""

    def __init__(self, configs: Sequence[LenderConfig], secret: str, authority: str | None = None) -> None:
        """Create the lenders without connecting.

        `secret` is the network's. `authority` is the file of the certificate authority that signs the network's certificates; None if there is none.
        """
        tls = client_context(authority)
        self._lenders = [Lender(config, secret, tls) for config in configs]

    def start(self) -> list[asyncio.Task[None]]:
        return [background.start(each.run, f"looking at what {each.name} lends") for each in self._lenders]

    def that_may_see(self, data_sites: DataSites) -> tuple[list[Lender], str]:
        """Return the lenders that may see a request, and a text for a response header that names the others."""
        if data_sites is None:
            return self._lenders, ""
        barred = [each.name for each in self._lenders if each.name not in data_sites]
        may = [each for each in self._lenders if each.name in data_sites]
        return may, "; ".join(f"{name}=no (data may not go there)" for name in barred)

    def statuses(self, infos: Mapping[str, ModelInfo]) -> tuple[LenderStatus, ...]:
        return tuple(lender.status(infos) for lender in self._lenders)

    def close(self) -> None:
        for lender in self._lenders:
            lender.close()
