"""Prompts that another site computes for this one, over HTTP to a real server: only if that is faster, and if their data may go there."""

import asyncio
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import msgspec
import pytest

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import AdapterSource, ModelLoad, PromptImage, SamplingParams, Submit, TokenOutput
from pilotlight.engine.api.struct import replace
from pilotlight.runtime.dispatch import lenders as lenders_module
from pilotlight.runtime.dispatch.dispatcher import PATIENCE, PATIENCE_S
from pilotlight.runtime.dispatch.hand_over import prefill_sequence
from pilotlight.runtime.dispatch.lenders import Lender
from pilotlight.sites.site import LenderConfig
from pilotlight.support import background
from pilotlight.wire.hop.data_sites import DATA_SITES, decode_data_sites, encode_data_sites
from pilotlight.wire.hop.headers import HOP, REQUEST_ID, Hop, sign_hop
from pilotlight.wire.hop.status import decode_status
from pilotlight.wire.http.client import ConnectionLost
from tests.asgi import Exchange, call, eventually, start
from tests.fakes import FakeLauncher, says
from tests.runtime.conftest import Site, SiteMaker
from tests.runtime.test_hand_over import LONG, fetched, turn
from tests.runtime.test_lending import LENDS, SECRET, computed
from tests.runtime.two_devices import CHAT

pytestmark = pytest.mark.process


class Network:
    """A site that lends, with a real server, and one that borrows and has two open streams."""

    def __init__(self, lender: Site, borrower: Site) -> None:
        self.lender, self.borrower = lender, borrower

    @property
    def known(self) -> Lender:
        found: Lender = self.borrower.app.site.models.lenders._lenders[0]
        return found

    async def ask(self, body: dict[str, Any], data_sites: str | None = "*") -> Exchange:
        raw = msgspec.json.encode(body)
        headers = {HOP: sign_hop(SECRET, time.time(), Hop("POST", CHAT, "r1", "iad1"), raw), REQUEST_ID: "r1"}
        if data_sites is not None:
            headers[DATA_SITES] = data_sites
        return await Exchange(self.borrower.app, "POST", CHAT, raw, headers).done()

    def weigh(self, block_bytes: int, bytes_per_s: float) -> None:
        """Set the size of the model's blocks and the measured rate of the link."""
        state = self.borrower.app.site.models.states["tiny"]
        state.info = replace(state.info, kv_block_bytes=block_bytes, kv_windows=(None,))
        self.known.link.note_blocks(bytes_per_s)


@pytest.fixture
async def network(
    make_site: SiteMaker, make_server: SiteMaker, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Network]:
    monkeypatch.setattr(lenders_module, "LOOK_EVERY_S", 0.02)
    launchers = FakeLauncher(), FakeLauncher()
    for launcher in launchers:
        launcher.peer_address = "ipc:///blocks"
    async with make_server(launcher=launchers[0], hop_secret=SECRET, engine=LENDS) as lender:
        engine = {"kv_host_gib": 0.1, "lenders": [{"site": "ams1", "url": lender.url}]}
        async with make_site(launcher=launchers[1], hop_secret=SECRET, name="iad1", engine=engine) as borrower:
            for site, rate in ((lender, 200.0), (borrower, 100.0)):
                site.engine.loads["tiny"] = ModelLoad(prefill_tokens_per_s=rate, total_blocks=64)
            made, gate = Network(lender, borrower), asyncio.Event()
            await eventually(lambda: made.known.link.bytes_per_s and made.known._lendable.models.get("tiny"))
            borrower.engine.answer = lambda submit: [*says("H", finish=None), gate, *says("i")]
            own = [start(borrower.app, CHAT, turn(f"{i}", stream=True, max_tokens=400)) for i in range(2)]
            for exchange in own:
                await exchange.until(b"H")
            borrower.engine.answer = lambda submit: fetched(submit, 240, 224 if submit.fetch_from else 0)
            lender.engine.script = computed()
            yield made
            gate.set()
            for exchange in own:
                await exchange.done()
            await borrower.is_idle()
            await lender.is_idle()


async def test_a_prompt_is_computed_at_the_other_site(network: Network) -> None:
    answer = await network.ask(turn(LONG))
    assert answer.status == 200
    route = answer.headers["x-pilotlight-route"]
    assert route.startswith("prompt=ams1; here="), route
    assert " Mbit/s)" in route
    (there,), here = network.lender.engine.submits, network.borrower.engine.submits[-1]
    assert here.fetch_from is not None
    assert (here.fetch_from.address, here.fetch_from.is_lent) == ("tcp://127.0.0.1:9300", True)
    assert here.fetch_from.hand_over == there.sequence_id
    predicted_s = float(route.partition("; ams1=")[2].partition(" ")[0]) / 1e3
    assert here.fetch_from.within_s == pytest.approx(PATIENCE_S + PATIENCE * predicted_s, rel=0.01)
    assert there.salt == here.salt, "a tenant's, at both"
    assert here.prompt_token_ids[: len(there.prompt_token_ids)] == there.prompt_token_ids
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 16, (
        "the tokens that were not computed again"
    )
    text = (await call(network.borrower.app, "/metrics")).body.decode()
    assert 'pilotlight_prompts_placed_total{model_name="tiny",where="borrowed"} 1.0' in text
    assert 'pilotlight_lender_borrowed_total{lender="ams1"} 1.0' in text
    assert 'pilotlight_lender_usable{lender="ams1"} 1.0' in text
    (status,) = decode_status((await call(network.borrower.app, "/status")).body).lenders
    assert (status.site, status.why_not, status.borrowed) == ("ams1", "", 1)
    assert status.rtt_ms > 0
    assert status.mbit_per_s > 0
    assert status.terms["tiny"].tokens_per_s == 200.0, "routers predict with the terms of the dispatcher"
    assert status.terms["tiny"].rtt_s == pytest.approx(status.rtt_ms / 1000, abs=1e-3)


async def test_a_link_that_costs_more_than_it_saves_says_so(network: Network) -> None:
    network.weigh(block_bytes=1 << 20, bytes_per_s=1.25e6)
    answer = await network.ask(turn(LONG))
    route = answer.headers["x-pilotlight-route"]
    assert route.startswith("prompt=here; here="), route
    predicted = float(route.partition("; ams1=")[2].partition(" ")[0])
    num_tokens = answer.json["usage"]["prompt_tokens"]
    expected_s = (
        num_tokens / 200 + num_tokens // 16 * 2**20 / 1.25e6
    )  # the bytes, at the link's rate; they are one chunk
    assert predicted == pytest.approx(1000 * expected_s, rel=0.1)
    assert "at 10.0 Mbit/s)" in route
    assert not network.lender.engine.submits
    network.weigh(block_bytes=1 << 10, bytes_per_s=1.25e9)
    assert (await network.ask(turn("Another. " + LONG))).headers["x-pilotlight-route"].startswith("prompt=ams1; ")


@pytest.mark.parametrize("data_sites", [None, "", "fra1,sin1"])
async def test_data_goes_only_where_a_router_says_that_it_may(network: Network, data_sites: str | None) -> None:
    route = (await network.ask(turn(LONG), data_sites)).headers["x-pilotlight-route"]
    assert route.startswith("prompt=here; here=")
    assert route.endswith("; ams1=no (data may not go there)")
    assert not network.lender.engine.submits
    free = await network.ask(turn("Another. " + LONG), "ams1,fra1")
    assert free.headers["x-pilotlight-route"].startswith("prompt=ams1; ")


async def test_a_client_cannot_say_where_data_may_go(network: Network) -> None:
    plain = await call(network.borrower.app, CHAT, turn(LONG), **{DATA_SITES: "*"})
    assert plain.headers["x-pilotlight-route"].endswith("; ams1=no (data may not go there)")
    assert not network.lender.engine.submits


async def test_a_site_that_declines_is_done_without(network: Network) -> None:
    looks = 0

    async def blind() -> None:
        nonlocal looks
        looks += 1

    network.known._look = blind  # type: ignore[method-assign]
    await eventually(lambda: looks)  # no query is in progress any more
    network.lender.app.site.models.assignments.num_open = lambda replica: 1  # a local request has just arrived
    answer = await network.ask(turn(LONG))
    assert answer.status == 200
    assert answer.headers["x-pilotlight-route"].startswith("prompt=here; here=")
    assert answer.headers["x-pilotlight-route"].endswith("; ams1 declined")
    assert network.borrower.engine.submits[-1].fetch_from is None
    assert network.known.num_declined == 1


async def test_a_site_of_whose_prompt_nothing_came_is_left_alone(network: Network) -> None:
    network.borrower.engine.answer = lambda submit: fetched(submit, 0, 0)
    assert (await network.ask(turn(LONG))).headers["x-pilotlight-route"].startswith("prompt=ams1; ")
    other = (await network.ask(turn(LONG + "and more " * 9, user="b"))).headers["x-pilotlight-route"]
    assert "; ams1=no (no block of the last prompt arrived)" in other


async def test_prompts_with_images_or_an_adapter_stay_here(network: Network) -> None:
    """The other site could not compute them correctly."""
    submit, info = network.borrower.engine.submits[-1], network.borrower.app.site.models.states["tiny"].info
    assert math.isfinite(network.known.offer(submit, 100, info, 100.0, 1.0, 0.0).cost_s)
    image = PromptImage(position=3, num_tokens=4, digest=bytes(32))
    for other in (replace(submit, adapter=AdapterSource("a", "/a", "d")), replace(submit, images=(image,))):
        offer = network.known.offer(other, 100, info, 100.0, 1.0, 0.0)
        assert (offer.cost_s, offer.why) == (math.inf, "no (prompts with images or an adapter are not lent)")


async def test_a_distant_site_costs_its_round_trips(network: Network) -> None:
    submit, info = network.borrower.engine.submits[-1], network.borrower.app.site.models.states["tiny"].info
    near = network.known.offer(submit, 100, info, 100.0, 1.0, 0.0)
    network.known.link.rtt_s += 0.25
    far = network.known.offer(submit, 100, info, 100.0, 1.0, 0.0)
    assert far.cost_s - near.cost_s == pytest.approx(0.5)


async def test_a_prompt_queues_behind_those_that_the_other_site_computes(network: Network) -> None:
    submit, info = network.borrower.engine.submits[-1], network.borrower.app.site.models.states["tiny"].info
    network.weigh(block_bytes=1 << 10, bytes_per_s=1.25e9)
    alone = network.known.offer(submit, 100, info, 100.0, 1.0, 0.0)
    network.lender.engine.scripts = [[asyncio.Event()]]
    prefill = prefill_sequence(replace(submit, prompt_token_ids=tuple(range(1601))), 16)
    async with network.known.computing(prefill):
        queued = network.known.offer(submit, 100, info, 100.0, 1.0, 0.0)
        await eventually(lambda: network.known._open_tokens_then)
        again = network.known.offer(submit, 100, info, 100.0, 1.0, 0.0)
    assert queued.cost_s - alone.cost_s == pytest.approx(1601 / 200, rel=0.1)
    assert again.cost_s == pytest.approx(queued.cost_s, rel=0.1), "the site's own report does not count it twice"


async def test_a_site_whose_predictions_were_wrong_must_promise_more(network: Network) -> None:
    network.weigh(block_bytes=1 << 10, bytes_per_s=1.25e9)
    for _ in range(20):
        network.known.note_found(TokenOutput(""), is_late=False, is_lost=False, overrun=8.0)
    answer = await network.ask(turn(LONG))
    assert answer.headers["x-pilotlight-route"].startswith("prompt=here; here=")
    for _ in range(40):
        network.known.note_found(TokenOutput(""), is_late=False, is_lost=False, overrun=1.0)
    other = await network.ask(turn("Another. " + LONG))
    assert other.headers["x-pilotlight-route"].startswith("prompt=ams1; ")


async def test_a_site_hears_that_its_prompt_is_wanted_no_more(network: Network) -> None:
    network.lender.engine.scripts = [[asyncio.Event()]]
    prefill = prefill_sequence(network.borrower.engine.submits[-1], 16)
    async with network.known.computing(prefill):
        await eventually(lambda: network.lender.engine.open == {prefill.sequence_id})
    await eventually(lambda: prefill.sequence_id in network.lender.engine.aborted)


async def test_a_way_that_is_measured_is_not_measured_again_with_each_look(network: Network) -> None:
    looks, probes = 0, 0
    look = network.known._look

    async def looked() -> None:
        nonlocal looks
        await look()
        looks += 1

    async def probed() -> None:
        nonlocal probes
        probes += 1

    network.known._look, network.known._probe = looked, probed  # type: ignore[method-assign]
    await eventually(lambda: looks > 3)
    assert probes == 0
    network.known.link.doubt()
    await eventually(lambda: probes > 0)


class Scripted:
    """A fake site that answers each request with the next of these byte strings. It closes the connection after an incomplete answer."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.num_asked = 0

    async def __aenter__(self) -> Lender:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self._lender = Lender(
            LenderConfig(site="ams1", url=f"http://127.0.0.1:{port}"), SECRET, ssl.create_default_context()
        )
        return self._lender

    async def __aexit__(self, *_: object) -> None:
        self._lender.close()
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
                self.num_asked += 1
                answer = self._answers.pop(0)
                writer.write(answer)
                if not answer.endswith(b"}"):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed the connection
        finally:
            writer.close()


def answered(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


LENDABLE = answered(b'{"models": {"tiny": 1000.0}}')


async def test_an_answer_that_has_started_on_a_kept_connection_is_not_requested_again() -> None:
    site = Scripted(LENDABLE, b"HTTP/1.1 200 OK\r\n", LENDABLE, b"", LENDABLE)
    async with site as lender:
        await lender._look()
        with pytest.raises(ConnectionLost):
            await lender._look()
        assert site.num_asked == 2
        await lender._look()
        await lender._look()  # the idle connection was closed, so the request is sent again on a new one
        assert site.num_asked == 5


async def test_an_answer_without_end_is_left() -> None:
    async with Scripted(answered(b" " * (2 << 20) + b"{}")) as lender:
        with pytest.raises(ConnectionLost, match="more than 1048576 bytes"):
            await lender._look()


@pytest.mark.parametrize(
    ("answer", "num_kept"),
    [
        (answered(b'{"models": "of another version"}'), 1),  # read to its end, so the connection may be reused
        (answered(b" " * (2 << 20) + b"{}"), 0),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{"models": {}', 0),
    ],
)
async def test_a_look_that_fails_leaves_no_connection_behind(answer: bytes, num_kept: int) -> None:
    async with Scripted(*[answer] * 3) as lender:
        for _ in range(3):
            with pytest.raises((msgspec.DecodeError, ConnectionLost, TimeoutError)):
                async with asyncio.timeout(0.2):
                    await lender._look()
        assert lender._pool.num_open == num_kept


async def test_a_site_that_has_declined_is_not_asked_before_the_next_look() -> None:
    refusal = answered(b'{"error": {"message": "local requests come first"}}', "503 Service Unavailable")
    async with Scripted(LENDABLE, refusal) as lender:
        await lender._look()
        assert lender.status({}).why_not == ""
        prefill = Submit("a", "tiny", (1, 2, 3), SamplingParams(max_tokens=1), b"")
        with pytest.raises(EngineError, match="ams1 computes no prompt: local requests"):
            async with lender.computing(prefill):
                pass
        assert lender.status({}).why_not == "it declined: local requests come first"
        assert lender._why_not("tiny") != ""


@pytest.mark.parametrize("word", ["gr\u00f6\u00dfer als \u6a21\u578b", "two\r\nlines", "a\ttab\x00"])
async def test_another_sites_words_fit_into_a_header(word: str) -> None:
    body = msgspec.json.encode({"models": {}, "why_not": word})
    refusal = answered(msgspec.json.encode({"error": {"message": word}}), "503 Service Unavailable")
    async with Scripted(answered(body), refusal) as lender:
        await lender._look()
        prefill = Submit("a", "tiny", (1, 2, 3), SamplingParams(max_tokens=1), b"")
        assert lender.offer(prefill, 3, cast(Any, None), 1.0, 1.0, 0.0).why.isprintable()
        with pytest.raises(EngineError):
            async with lender.computing(prefill):
                pass
        why = lender.offer(prefill, 3, cast(Any, None), 1.0, 1.0, 0.0).why
        assert why.startswith("no (it declined: ")
        assert why.isascii()
        assert why.isprintable()


def test_a_site_of_which_nothing_comes_again_and_again_is_left_alone_for_longer() -> None:
    lender, output = (
        Lender(LenderConfig(site="ams1", url="http://127.0.0.1:1"), SECRET, ssl.create_default_context()),
        TokenOutput(""),
    )
    rests = []
    for _ in range(8):
        lender.note_found(output, is_late=False, is_lost=True, overrun=1.0)
        rests.append(lender._rest_s)
    assert rests == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0]
    lender.note_found(output, is_late=False, is_lost=False, overrun=1.0)
    lender.note_found(output, is_late=False, is_lost=True, overrun=1.0)
    assert lender._rest_s == 10.0
    lender.close()


async def test_blocks_measure_the_link(network: Network) -> None:
    def slow(submit: Submit) -> list[Any]:
        first, last = fetched(submit, 240, 224)
        assert isinstance(first, TokenOutput)
        return [replace(first, fetched_bytes_per_s=2e6), last]

    network.borrower.engine.answer = slow
    assert (await network.ask(turn(LONG))).headers["x-pilotlight-route"].startswith("prompt=ams1; ")
    assert network.known.link.bytes_per_s == 2e6


async def test_a_site_that_is_gone_costs_nothing(network: Network) -> None:
    network.lender.stop.set()
    await eventually(lambda: not network.known._lendable.models)
    answer = await network.ask(turn(LONG))
    assert answer.status == 200
    assert "; ams1=no (" in answer.headers["x-pilotlight-route"]
    (status,) = decode_status((await call(network.borrower.app, "/status")).body).lenders
    assert status.why_not != ""


def test_a_probe_says_less_than_blocks_until_these_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    link = lenders_module.MeasuredLink()
    link.note_probe(5.0)
    assert link.bytes_per_s == 5.0
    link.note_blocks(100.0)
    link.note_probe(50.0)
    assert link.bytes_per_s == 100.0
    link.note_probe(200.0)
    assert link.bytes_per_s == 200.0, "it cannot have come faster than it can"
    link.doubt()
    link.note_probe(50.0)
    assert link.bytes_per_s == 50.0


def test_sites_survive_their_header() -> None:
    assert decode_data_sites(encode_data_sites(None)) is None
    assert decode_data_sites(encode_data_sites(["b", "a"])) == ("a", "b")
    assert decode_data_sites(encode_data_sites([])) == ()
    assert decode_data_sites(None) == ()


async def test_an_error_of_a_lenders_look_is_logged_and_the_next_look_follows(
    network: Network, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "RESTART_AFTER_S", 0.0)
    known, sweeps = network.known, []

    def sweep() -> None:
        sweeps.append(1)
        if len(sweeps) == 1:
            raise ValueError("on purpose")

    monkeypatch.setattr(known._pool, "sweep", sweep)
    await eventually(lambda: len(sweeps) > 2)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == ["looking at what ams1 lends failed and starts again in 0 s"]
