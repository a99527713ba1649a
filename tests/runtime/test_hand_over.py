"""Prompts that move from prefill to decode hosts: their placement, its conditions, and recovery when a host is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.engine.api.protocol import ModelLoad, PromptImage, SamplingParams, Submit, TokenOutput
from pilotlight.engine.api.struct import replace
from pilotlight.runtime.cli.serve_command import Served
from pilotlight.runtime.dispatch.hand_over import PrefillWork
from pilotlight.runtime.dispatch.sequences import prefill_sequence
from pilotlight.runtime.timings import SiteTimings
from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.site import EngineConfig
from pilotlight.wire.hop.status import decode_status
from tests.asgi import Exchange, call, eventually, start
from tests.fakes import FakeEngineClient, FakeLauncher, Step, ids, says
from tests.runtime.conftest import SiteMaker
from tests.runtime.test_embeddings import embeds
from tests.runtime.two_devices import CHAT, QUICK, Pair, make_pair

__all__ = ["make_pair"]

HOSTS = {"devices": None, "hosts": [{"device": "cpu", "role": "prefill"}, {"device": "cpu", "role": "decode"}]}
LONG = "the pilot light of a gas stove burns small and blue until somebody wants warm water " * 3  # data


@pytest.fixture
def split(make_site: SiteMaker) -> Callable[..., Any]:
    """Return a function that makes sites with a prefill host and a decode host."""

    @asynccontextmanager
    async def make(
        prepare: Callable[[FakeEngineClient], None] = lambda client: None, timings: SiteTimings = QUICK, **engine: Any
    ) -> AsyncIterator[Pair]:
        launchers = FakeLauncher(prepare), FakeLauncher(prepare)
        for launcher, name in zip(launchers, ("prefill", "decode"), strict=True):
            launcher.peer_address = f"ipc:///{name}"
        tables = {**HOSTS, "kv_host_gib": 0.1, "scale_up_wait_s": 0.0, **engine}
        del tables["devices"]
        async with make_site(launcher=launchers[0], further=[launchers[1]], timings=timings, engine=tables) as site:
            pair = Pair(site, *launchers)
            await eventually(lambda: all(pair.awake))
            for client in pair.engines:
                client.loads["tiny"] = ModelLoad(prefill_tokens_per_s=1000.0, decode_tokens_per_s=20.0, total_blocks=64)
            yield pair
            await site.is_idle()
            for replica in pair.replicas():
                work = replica.work
                assert (work.sequences, work.prefill_tokens, work.decode_tokens) == (0, 0, 0)
            assert all(not client.open for client in pair.engines)

    return make


def turn(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


class Busy:
    """Streams on the decode host that stay open until they are released."""

    def __init__(self, pair: Pair, number: int = 3) -> None:
        self.pair, self.number = pair, number
        self.gate = asyncio.Event()
        self.exchanges: list[Exchange] = []

    async def __aenter__(self) -> None:
        decode = self.pair.engines[1]
        decode.answer = lambda submit: [*says("H", finish=None), self.gate, *says("i")]
        for i in range(self.number):
            self.exchanges.append(start(self.pair.site.app, CHAT, turn(f"{i}", stream=True, max_tokens=400)))
            await self.exchanges[-1].until(b"H")
        decode.answer = None

    async def __aexit__(self, *_: object) -> None:
        self.gate.set()
        for exchange in self.exchanges:
            await exchange.done()


def one_token(cached: int) -> list[Step]:
    return [TokenOutput("", ids("x"), finish_reason="length", num_cached_tokens=cached)]


def fetched(submit: Submit, cached: int, from_peer: int) -> list[Step]:
    first = TokenOutput("", ids("Hi"), num_cached_tokens=cached, num_fetched_tokens=from_peer)
    return [first, TokenOutput("", ids("!"), finish_reason="stop")]


async def test_a_long_prompt_is_computed_elsewhere_where_it_would_hold_up_others(split: Callable[..., Any]) -> None:
    async with split() as pair:
        prefill, decode = pair.engines
        async with Busy(pair):
            prefill.script = one_token(cached=32)
            decode.answer = lambda submit: fetched(submit, 240, 224)
            answer = await call(pair.site.app, CHAT, turn(LONG))
            assert answer.status == 200
            usage = answer.json["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 32, "the tokens that were not computed again"
            (leg,), asked = prefill.submits, decode.submits[-1]
            assert leg.hands_over
            assert leg.sampling.max_tokens == 1
            assert asked.prompt_token_ids[: len(leg.prompt_token_ids)] == leg.prompt_token_ids
            assert len(leg.prompt_token_ids) == (len(asked.prompt_token_ids) - 1) // 16 * 16 + 1
            assert leg.salt == asked.salt
            assert asked.fetch_from is not None
            assert (asked.fetch_from.address, asked.fetch_from.hand_over) == ("ipc:///prefill", leg.sequence_id)
            assert asked.sampling.max_tokens != 1
            assert answer.headers["x-pilotlight-route"].startswith("prompt=engine 0; here=")
        text = await pair.metrics()
        assert pair.site.app.site.models.states["tiny"].replicas[0].takes_prompts, "it was not late"
        assert 'pilotlight_prompts_placed_total{model_name="tiny",where="handed_over"} 1.0' in text
        assert 'pilotlight_prompts_placed_total{model_name="tiny",where="here"} 3.0' in text


async def test_an_idle_host_computes_its_own_prompts(split: Callable[..., Any]) -> None:
    async with split() as pair:
        answer = await call(pair.site.app, CHAT, turn(LONG))
        assert answer.status == 200
        assert [len(client.submits) for client in pair.engines] == [0, 1]
        assert answer.headers["x-pilotlight-route"].startswith("prompt=here; here=")


async def test_a_host_for_prompts_answers_while_answers_wait_and_goes_back(split: Callable[..., Any]) -> None:
    async with split(
        timings=QUICK._replace(hot_for_s=0.0), shift_roles=True, scale_up_wait_s=0.05, scale_down_after_s=0.1
    ) as pair:
        prefill, _ = pair.engines

        async def roles() -> list[str | None]:
            status = decode_status((await call(pair.site.app, "/status")).body)
            return [process.computes for process in status.processes if process.role == "engine"]

        async with Busy(pair):
            await eventually(lambda: pair.replicas()[0].host.role == "both")
            assert await roles() == ["both", "decode"]
            assert "pilotlight_engine_hosts_shifted 1.0" in await pair.metrics()
            prefill.script = says("Hi")
            assert (await call(pair.site.app, CHAT, turn("Hello"))).status == 200
            assert not prefill.submits[-1].hands_over
        await eventually(lambda: pair.replicas()[0].host.role == "prefill")
        assert await roles() == ["prefill", "decode"]
        assert all(pair.awake), "neither is taken for one too many"


async def test_short_prompts_and_slow_ways_are_no_reason_to_split(split: Callable[..., Any]) -> None:
    async with split() as pair, Busy(pair):
        prefill, decode = pair.engines
        decode.script = says("Hi")
        short = await call(pair.site.app, CHAT, turn("Hi"))
        assert short.headers["x-pilotlight-route"] == "prompt=here; reason=short"
        prefill.loads["tiny"] = ModelLoad(prefill_tokens_per_s=1000.0, handed_over_tokens_per_s=50.0, total_blocks=64)
        assert (await call(pair.site.app, CHAT, turn(LONG))).headers["x-pilotlight-route"].startswith("prompt=here")
        pair.replicas()[0].work.prefill_tokens += 10_000  # the prefill host has a queue as well
        prefill.loads["tiny"] = ModelLoad(prefill_tokens_per_s=1000.0, total_blocks=64)
        again = await call(pair.site.app, CHAT, turn("Another. " + LONG))
        pair.replicas()[0].work.prefill_tokens -= 10_000
        assert again.headers["x-pilotlight-route"].startswith("prompt=here")
        assert not prefill.submits


async def test_a_cached_prompt_stays_where_it_is_cached(split: Callable[..., Any]) -> None:
    async with split() as pair, Busy(pair):
        prefill, decode = pair.engines
        prefill.answer = lambda submit: one_token(0)
        decode.answer = lambda submit: says("Hi")
        for expected in (1, 1):
            assert (await call(pair.site.app, CHAT, turn(LONG))).status == 200
            assert len(prefill.submits) == expected


async def test_only_the_first_of_several_choices_is_handed_over(split: Callable[..., Any]) -> None:
    async with split() as pair, Busy(pair):
        prefill, decode = pair.engines
        prefill.answer = lambda submit: one_token(0)
        decode.answer = lambda submit: says("Hi")
        assert len((await call(pair.site.app, CHAT, turn(LONG, n=3))).json["choices"]) == 3
        assert len(prefill.submits) == 1
        assert [submit.fetch_from is not None for submit in decode.submits[-3:]] == [True, False, False]


async def test_texts_are_embedded_where_prompts_are_computed(split: Callable[..., Any]) -> None:
    def embed(client: FakeEngineClient) -> None:
        client.pooling, client.embedding_size, client.answer = "mean", 4, embeds

    async with split(prepare=embed) as pair:
        prefill, decode = pair.engines
        body = {"model": "tiny", "input": ["one", "two"]}
        assert len((await call(pair.site.app, "/v1/embeddings", body)).json["data"]) == 2
        assert [len(client.submits) for client in (prefill, decode)] == [2, 0]
        pair.launchers[0].hosts[-1].die()
        assert (await call(pair.site.app, "/v1/embeddings", body)).status == 200
        assert not any(submit.hands_over for client in pair.engines for submit in client.submits)


async def test_a_prefill_host_that_dies_costs_no_token(split: Callable[..., Any]) -> None:
    async with split() as pair, Busy(pair):
        prefill, decode = pair.engines
        dying = asyncio.Event()
        prefill.answer = lambda submit: [asyncio.Event()]
        decode.answer = lambda submit: [dying, *says("Hi")]
        stream = start(pair.site.app, CHAT, turn(LONG, stream=True))
        await eventually(lambda: len(decode.open) == 4)
        pair.launchers[0].hosts[-1].die()
        dying.set()
        await stream.done()
        assert b'"content":"H"' in stream.body or b"Hi" in stream.body
        assert b"error" not in stream.body
        assert b"[DONE]" in stream.body


async def test_a_decode_host_that_dies_takes_its_prefill_along_and_the_answer_continues(
    split: Callable[..., Any],
) -> None:
    async with split() as pair:
        prefill, decode = pair.engines
        busy = Busy(pair)
        async with busy:
            prefill.answer = lambda submit: [asyncio.Event()] if submit.hands_over else says("Hi")
            decode.answer = lambda submit: [asyncio.Event()]
            stream = start(pair.site.app, CHAT, turn(LONG, stream=True))
            await eventually(lambda: any(submit.hands_over for submit in prefill.submits))
            leg = prefill.submits[-1].sequence_id
            pair.launchers[1].hosts[-1].die()
            await stream.done()
            assert leg in prefill.aborted
            assert b"[DONE]" in stream.body
            assert b"error" not in stream.body


async def test_a_host_that_has_computed_a_prompt_owes_nothing_while_the_answer_continues(
    split: Callable[..., Any],
) -> None:
    async with split() as pair, Busy(pair):
        prefill, decode = pair.engines
        prefill.answer = lambda submit: one_token(0)
        gate = asyncio.Event()
        decode.answer = lambda submit: [*says("H", finish=None), gate, *says("i")]
        stream = start(pair.site.app, CHAT, turn(LONG, stream=True))
        await stream.until(b"H")
        host = pair.replicas()[0].host
        await eventually(lambda: not host.progress.has_work)
        assert pair.replicas()[0].work.sequences == 0
        gate.set()
        await stream.done()


async def test_a_host_that_was_late_is_asked_again_once_it_is_heard_of(split: Callable[..., Any]) -> None:
    async with split() as pair, Busy(pair):
        prefill, decode = pair.engines
        prefill.answer = lambda submit: [asyncio.Event()]
        decode.answer = lambda submit: says("Hi")
        assert (await call(pair.site.app, CHAT, turn(LONG))).status == 200
        again = await call(pair.site.app, CHAT, turn("Again. " + LONG))
        assert again.headers["x-pilotlight-route"] == "prompt=here; reason=no other host for prompts is up"
        prefill.heartbeat()
        assert (
            (await call(pair.site.app, CHAT, turn("Once more. " + LONG)))
            .headers["x-pilotlight-route"]
            .startswith("prompt=engine 0")
        )


async def test_a_client_that_leaves_ends_both_sequences(split: Callable[..., Any]) -> None:
    async with split() as pair, Busy(pair):
        prefill, decode = pair.engines
        prefill.answer = lambda submit: [asyncio.Event()]
        decode.answer = lambda submit: [asyncio.Event()]
        stream = start(pair.site.app, CHAT, turn(LONG, stream=True))
        await eventually(lambda: bool(prefill.open) and len(decode.open) == 4)
        stream.disconnect()
        await stream.done()
        await eventually(lambda: not prefill.open and len(decode.open) == 3)


async def test_a_model_wakes_again_on_the_role_that_it_lost(split: Callable[..., Any]) -> None:
    async with split() as pair:
        for index in (0, 1):
            pair.launchers[index].hosts[-1].die()
            await eventually(lambda: all(pair.awake) and pair.site.app.site.fleet.num_up == 2)
        assert (await call(pair.site.app, CHAT, turn("Hi"))).status == 200


@pytest.mark.parametrize(("length", "handed_over"), [(16, 0), (17, 16), (32, 16), (33, 32)])
def test_the_block_with_a_prompts_last_token_is_not_handed_over(length: int, handed_over: int) -> None:
    """The decode host computes that token itself, so this block would be fetched for nothing."""
    submit = Submit("a", "tiny", tuple(range(length)), SamplingParams(max_tokens=4), b"")
    assert prefill_sequence(submit, 16).prompt_token_ids == submit.prompt_token_ids[: handed_over + 1]


def test_an_image_whose_tokens_see_each_other_is_computed_whole_for_a_hand_over() -> None:
    images = tuple(PromptImage(start, 9, bytes(32), is_bidirectional=True) for start in (3, 28, 40))
    submit = Submit("a", "tiny", tuple(range(50)), SamplingParams(max_tokens=4), b"", images=images)
    shorter = replace(submit, prompt_token_ids=submit.prompt_token_ids[:47])
    assert [len(prefill_sequence(each, 16).prompt_token_ids) for each in (submit, shorter)] == [49, 37]
    assert [image.position for image in prefill_sequence(shorter, 16).images] == [3, 28]
    divisible = tuple(replace(image, is_bidirectional=False) for image in images)
    assert len(prefill_sequence(replace(shorter, images=divisible), 16).prompt_token_ids) == 33


def test_serve_makes_hosts_of_both_roles() -> None:
    engine = Served("ember", "127.0.0.1", 8000, device="cpu", kv_gib=0.5, num_prefill=1, num_decode=2).site().engine
    assert engine.roles == ("prefill", "decode", "decode")
    assert engine.all_devices == ("cpu",) * 3
    assert engine.kv_host_gib == 0.5, "blocks go through host memory"
    assert not Served("ember", "127.0.0.1", 8000).site().engine.is_split


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"hosts": [{"role": "prefill"}], "kv_host_gib": 1.0}, "no host can answer"),
        ({"hosts": [{"role": "decode"}], "kv_host_gib": 1.0}, "no host can compute prompts"),
        ({"hosts": HOSTS["hosts"]}, "kv_host_gib above 0"),
        ({"devices": ["cuda:0", "cuda:1"], "shift_roles": True}, "different roles"),
        ({"hosts": HOSTS["hosts"], "kv_host_gib": 1.0, "shift_roles": True, "scale_up_wait_s": 0.0}, "scale_up_wait_s"),
        ({"hosts": HOSTS["hosts"], "devices": ["cpu", "cpu"]}, "remove the others"),
        ({"hosts": [{"device": "tpu"}]}, "is not a device"),
        ({"hosts": [{"role": "prefil"}]}, "role"),
        ({"hosts": [{"device": "cuda:0"}, {"device": "cuda:0"}]}, "named twice"),
    ],
)
def test_hosts_that_cannot_work_are_refused_by_name(engine: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse(EngineConfig, engine, "site.toml")


async def test_a_request_that_ends_as_its_prompt_is_taken_ends_the_prompt_without_an_error_of_its_own() -> None:
    ended_by: list[type[BaseException]] = []

    class Client:
        @asynccontextmanager
        async def generate(self, _: object) -> AsyncIterator[AsyncIterator[TokenOutput]]:
            request.cancel()
            try:
                yield never()
            except BaseException as error:
                ended_by.append(type(error))
                raise

    async def never() -> AsyncIterator[TokenOutput]:
        await asyncio.Event().wait()
        yield TokenOutput("", ())

    async def run() -> None:
        async with work.running(submit, submit, 1.0):
            raise AssertionError("the request has ended")

    progress = SimpleNamespace(expected=nullcontext)
    host = SimpleNamespace(serving_client=Client, peer_address="ipc:///prefill", progress=progress)
    assignments = SimpleNamespace(assigned=lambda submit, replica: nullcontext())
    work = PrefillWork(cast("Any", SimpleNamespace(host=host)), cast("Any", assignments))
    submit = cast("Any", None)
    request = asyncio.create_task(run())
    with pytest.raises(asyncio.CancelledError):
        await request
    assert ended_by == [asyncio.CancelledError]
