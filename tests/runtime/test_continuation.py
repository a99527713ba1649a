"""Sequences of a dead host continue at the next host without a visible difference, or end with an error (I1, I3, I6, I8)."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.protocol import PRIORITIES, SamplingParams, Submit, TokenLogprobs, TokenOutput
from pilotlight.engine.api.step_journal import HeldSequences
from pilotlight.engine.api.struct import replace
from pilotlight.runtime.dispatch.continuation import Continuations
from tests.asgi import call, eventually, start
from tests.fakes import EOS, FakeEngineClient, FakeLauncher, Step, ids, says
from tests.runtime.conftest import Site, SiteMaker

CHAT = "/ai/v1/chat/completions"
COMPLETIONS = "/ai/v1/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "seed": 7}
STREAMED = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
TEXT = "The pilot light burns."


class Mortal:
    """A launcher of hosts that continue `text` from any position. Host i dies after `dies_at[i]` tokens of each sequence, if set."""

    def __init__(
        self, *dies_at: int | None, text: str = TEXT, how: str = "die", gate: asyncio.Event | None = None
    ) -> None:
        """Prepare hosts. `how` is "die" for hosts that are killed, "crash" for hosts that end by themselves.

        All but the first host load the model when `gate` is set.
        """
        self.dies_at = dies_at
        self.gate = gate
        self.how = how
        self.token_ids = (*ids(text), EOS)
        self.launcher = FakeLauncher(self._prepare)
        self.clients: list[FakeEngineClient] = []

    def _prepare(self, client: FakeEngineClient) -> None:
        number = len(self.clients)
        self.clients.append(client)
        client.load_gate = self.gate if number else None
        dies_at = self.dies_at[number] if number < len(self.dies_at) else None

        async def die() -> None:
            getattr(self.launcher.hosts[number], self.how)(f"host {number} was killed")

        client.answer = lambda submit: self.outputs(submit, dies_at, number, die)

    def outputs(
        self, submit: Submit, dies_at: int | None, number: int, die: Callable[[], Awaitable[None]]
    ) -> Iterable[Step]:
        rest = self.token_ids[submit.num_delivered_tokens :]
        for i, token_id in enumerate(rest):
            if i == dies_at:
                yield die
            is_last = i == len(rest) - 1
            cached = 10 * number + 3 if i == 0 else None
            prompt_logprobs = (TokenLogprobs(-1.0),) if i == 0 and submit.sampling.prompt_logprobs else None
            yield TokenOutput("", (token_id,), "stop" if is_last else None, cached, prompt_logprobs=prompt_logprobs)
            yield 0.0


async def test_a_stream_continues_where_its_host_died(make_site: SiteMaker) -> None:
    mortal = Mortal(5)
    async with make_site(launcher=mortal.launcher) as site:
        answer = await call(site.app, CHAT, {**STREAMED, "max_tokens": 100, "temperature": 0.9})
        *chunks, usage, done = answer.events
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == TEXT
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert done == "[DONE]"
        assert usage["usage"]["completion_tokens"] == len(TEXT) + 1
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}, "what the first host found"
        (first,), (second,) = (client.submits for client in mortal.clients)
        assert second.prompt_token_ids == first.prompt_token_ids + ids(TEXT)[:5]
        assert second.num_delivered_tokens == 5
        assert (second.sampling.max_tokens, second.sampling.seed) == (95, first.sampling.seed)
        assert second.sampling.temperature == first.sampling.temperature
        assert (first.priority, second.priority) == (0, PRIORITIES[0])
        text = (await call(site.app, "/metrics")).body.decode()
        assert 'pilotlight_cut_sequences_total{model_name="tiny",outcome="continued"} 1.0' in text
        assert 'pilotlight_requests_total{model_name="tiny",outcome="stop"} 1.0' in text
        await site.is_idle()


async def test_every_choice_continues_for_itself(make_site: SiteMaker) -> None:
    mortal = Mortal(4)
    async with make_site(launcher=mortal.launcher) as site:
        answer = await call(site.app, CHAT, {**HELLO, "n": 3})
        assert [choice["message"]["content"] for choice in answer.json["choices"]] == [TEXT] * 3
        assert answer.json["usage"]["completion_tokens"] == 3 * (len(TEXT) + 1)
        first, second = (client.submits for client in mortal.clients)
        assert {s.sequence_id for s in second} == {s.sequence_id for s in first}
        assert {s.sampling.seed for s in second} == {s.sampling.seed for s in first}
        await site.is_idle()


@pytest.mark.parametrize("stop", ["pilot", "light"])  # the host dies after "The pil"
async def test_a_stop_string_across_or_after_the_cut_is_found(make_site: SiteMaker, stop: str) -> None:
    mortal = Mortal(7)
    async with make_site(launcher=mortal.launcher) as site:
        answer = await call(site.app, CHAT, {**HELLO, "stop": stop})
        assert answer.json["choices"][0]["message"]["content"] == TEXT.partition(stop)[0]
        assert mortal.clients[1].submits[0].num_delivered_tokens == 7
        await site.is_idle()


@pytest.mark.process
async def test_a_tool_call_across_the_cut_is_whole(make_site: SiteMaker) -> None:
    text = 'Ok. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    async with make_site(launcher=Mortal(20, text=text).launcher) as site:
        answer = await call(site.app, CHAT, {**HELLO, "tools": tools})
        (choice,) = answer.json["choices"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
        await site.is_idle()


@pytest.mark.parametrize(("dies_at", "again"), [(0, True), (3, False)])
async def test_prompt_logprobs_come_once(make_site: SiteMaker, dies_at: int, again: bool) -> None:
    mortal = Mortal(dies_at)
    async with make_site(launcher=mortal.launcher) as site:
        answer = await call(site.app, COMPLETIONS, {"model": "tiny", "prompt": "Hi", "prompt_logprobs": 0})
        assert answer.status == 200
        assert len(answer.json["choices"][0]["prompt_logprobs"]) == 2
        assert mortal.clients[1].submits[0].sampling.prompt_logprobs is again
        await site.is_idle()


async def test_a_sequence_that_had_not_started_is_submitted_unchanged(make_site: SiteMaker) -> None:
    mortal = Mortal(0)
    async with make_site(launcher=mortal.launcher) as site:
        answer = await call(site.app, CHAT, HELLO)
        assert answer.json["choices"][0]["message"]["content"] == TEXT
        (again,) = mortal.clients[1].submits
        assert replace(again, waited_s=0.0) == mortal.clients[0].submits[0]
        assert again.waited_s > 0.0, "it keeps its place among the host's sequences"
        assert answer.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 13}, "what the second host found"
        await site.is_idle()


async def test_a_request_under_which_two_hosts_crash_is_refused_by_name_then_and_when_it_comes_again(
    make_site: SiteMaker,
) -> None:
    mortal = Mortal(2, 2, how="crash")
    async with make_site(launcher=mortal.launcher) as site:
        answer = await call(site.app, CHAT, STREAMED)
        error = answer.events[-1]["error"]
        assert error["code"] == "request_failed"
        assert (
            "2 engine hosts have ended by themselves in a step that held this request; the last: " in error["message"]
        )
        await eventually(lambda: not site.app.site.why_not_ready())
        assert [client.submits[0].is_suspect for client in mortal.clients[:2]] == [False, True]
        assert len(mortal.clients) == 3
        again = await call(site.app, CHAT, HELLO)
        assert (again.status, again.json["error"]["code"]) == (422, "request_failed")
        assert mortal.clients[2].submits == [], "it has not come near the third host"
        other = {**HELLO, "messages": [{"role": "user", "content": "Hello"}]}
        assert (await call(site.app, CHAT, other)).json["choices"][0]["message"]["content"] == TEXT
        text = (await call(site.app, "/metrics")).body.decode()
        assert 'pilotlight_cut_sequences_total{model_name="tiny",outcome="failed"} 1.0' in text
        await site.is_idle()


async def test_hosts_that_are_killed_are_charged_to_no_request(make_site: SiteMaker) -> None:
    mortal = Mortal(2, 2, 2, 2, 2)
    async with make_site(launcher=mortal.launcher) as site:
        answer = await call(site.app, CHAT, HELLO)
        assert answer.json["choices"][0]["message"]["content"] == TEXT
        assert len(mortal.clients) == 6
        assert not any(client.submits[0].is_suspect for client in mortal.clients)
        await site.is_idle()


@pytest.mark.long
async def test_a_request_outlives_any_number_of_hosts_that_are_killed_before_they_have_computed(
    make_site: SiteMaker,
) -> None:
    mortal = Mortal(0, 0, 0, 0, how="kill")
    async with make_site(launcher=mortal.launcher) as site:
        answer = await call(site.app, CHAT, HELLO)
        assert answer.json["choices"][0]["message"]["content"] == TEXT
        assert len(mortal.clients) == 5
        await site.is_idle()


async def test_a_request_that_its_next_host_computes_is_charged_with_nothing_any_more(make_site: SiteMaker) -> None:
    mortal = Mortal(0, None, 0, how="crash")
    async with make_site(launcher=mortal.launcher) as site:
        for _ in range(2):
            answer = await call(site.app, CHAT, HELLO)
            assert answer.json["choices"][0]["message"]["content"] == TEXT
            site.launcher.hosts[-1].die()
            await eventually(lambda: not site.app.site.why_not_ready())
        await site.is_idle()


async def test_only_the_sequences_of_the_step_are_charged_with_a_crash(make_site: SiteMaker) -> None:
    async with make_site() as site:
        waiting, gate = start(site.app, CHAT, HELLO), asyncio.Event()
        site.engine.script = [gate]
        await eventually(lambda: len(site.engine.submits) == 1)
        first = site.launcher.hosts[0]
        first.ended_by_itself, first.journal = True, HeldSequences(("another",))
        first.die("the engine host (pid 4242) was ended by SIGSEGV")
        assert (await waiting.done()).status == 200
        assert [submit.is_suspect for submit in site.engine.submits] == [False]
        await site.is_idle()


@pytest.mark.parametrize(("suspended", "charged"), [(False, True), (True, False)])
async def test_a_step_past_its_deadline_is_charged_unless_the_process_was_stopped(
    make_site: SiteMaker, suspended: bool, charged: bool
) -> None:
    mortal = Mortal()
    async with make_site(launcher=mortal.launcher, engine={"step_deadline_s": 0.2}) as site:
        first = site.launcher.hosts[0]
        first.is_suspended = suspended
        mortal.clients[0].answer = lambda submit: [*says("The pi", finish=None), 30]
        waiting = start(site.app, CHAT, HELLO)
        await eventually(lambda: bool(mortal.clients[0].submits))
        first.journal = HeldSequences((mortal.clients[0].submits[0].sequence_id,))
        answer = await waiting.done()
        assert answer.json["choices"][0]["message"]["content"] == TEXT
        assert mortal.clients[1].submits[0].is_suspect is charged
        await site.is_idle()


async def test_a_host_that_ends_for_failed_steps_says_under_which_sequences(make_site: SiteMaker) -> None:
    mortal = Mortal()
    async with make_site(launcher=mortal.launcher) as site:

        async def fail() -> None:
            client = mortal.clients[0]
            client.failed_under = (client.submits[0].sequence_id,)
            site.launcher.hosts[0].die("the device counts as broken")

        mortal.clients[0].answer = lambda submit: [fail]
        assert (await call(site.app, CHAT, HELLO)).status == 200
        assert mortal.clients[1].submits[0].is_suspect
        await site.is_idle()


async def test_what_an_earlier_site_delivered_counts_at_the_next_host_too(make_site: SiteMaker) -> None:
    """Counts and random numbers refer to the answer's beginning, after any number of earlier sites and hosts."""
    mortal = Mortal(4, 2)
    async with make_site(launcher=mortal.launcher) as site:
        sampling = SamplingParams(max_tokens=100, temperature=0.9, seed=7)
        submit = Submit("s1", "tiny", (1, 2, *ids(TEXT)[:3]), sampling, num_delivered_tokens=3)
        outcomes: list[str] = []
        continuations = Continuations(
            site.app.site.fleet, site.app.site.models.dispatch, 10.0, lambda _, outcome: outcomes.append(outcome)
        )
        async with continuations.generate(submit) as outputs:
            delivered = [token_id async for output in outputs for token_id in output.token_ids]
        assert outcomes == ["continued", "continued"]
        assert delivered == list(mortal.token_ids[3:])
        submits = [client.submits[0] for client in mortal.clients]
        assert [s.num_delivered_tokens for s in submits] == [3, 7, 9]
        assert [len(s.prompt_token_ids) for s in submits] == [5, 9, 11]
        assert [s.sampling.max_tokens for s in submits] == [100, 96, 94]


async def test_a_sequence_that_has_left_its_dead_host_counts_nowhere_while_it_waits(make_site: SiteMaker) -> None:
    gate = asyncio.Event()
    mortal = Mortal(3, gate=gate)
    async with make_site(launcher=mortal.launcher) as site:
        exchange = start(site.app, CHAT, STREAMED)
        await eventually(lambda: len(mortal.clients) == 2)
        (replica,) = site.app.site.models.states["tiny"].replicas
        await eventually(lambda: not replica.work.sequences)
        gate.set()
        assert (await exchange.done()).events[-1] == "[DONE]"
        assert (replica.work.sequences, replica.work.prefill_tokens, replica.work.decode_tokens) == (0, 0, 0)
        await site.is_idle()


async def test_a_host_that_does_not_come_back_ends_the_stream_in_time(make_site: SiteMaker) -> None:
    gate = asyncio.Event()
    mortal = Mortal(3, gate=gate)
    async with make_site(launcher=mortal.launcher, limits={"continue_within_s": 0.2}) as site:
        answer = await call(site.app, CHAT, STREAMED)
        assert answer.events[-1]["error"]["code"] == "engine_error"
        assert answer.events[-1]["error"]["message"].count("on another host within") == 1, "it waited once"
        await site.is_idle()
        gate.set()


async def test_the_wait_for_a_host_is_as_long_as_hosts_take_to_start_here(make_site: SiteMaker) -> None:
    mortal = Mortal(3)
    async with make_site(launcher=mortal.launcher, limits={"continue_within_s": 0.05}) as site:
        (host,) = site.app.site.fleet.hosts
        assert 0.0 < host.start_s < 10.0, "the first start was measured"
        host.note_start(10.0)
        gate = asyncio.Event()
        prepare = mortal.launcher.prepare

        def hang(client: FakeEngineClient) -> None:
            prepare(client)
            client.load_gate = gate
            asyncio.get_running_loop().call_later(0.3, gate.set)

        mortal.launcher.prepare = hang
        answer = await call(site.app, CHAT, HELLO)
        assert answer.json["choices"][0]["message"]["content"] == TEXT
        await site.is_idle()


@pytest.mark.long
async def test_the_wait_for_a_host_begins_again_when_that_host_is_killed(make_site: SiteMaker) -> None:
    mortal = Mortal(3)
    async with make_site(launcher=mortal.launcher, limits={"continue_within_s": 1.0}) as site:
        gate = asyncio.Event()
        prepare = mortal.launcher.prepare

        def hang(client: FakeEngineClient) -> None:
            prepare(client)
            client.load_gate = gate
            loop, number = asyncio.get_running_loop(), len(site.launcher.hosts)
            if number == 1:
                loop.call_later(0.7, lambda: site.launcher.hosts[number].kill())
                loop.call_later(1.2, gate.set)

        mortal.launcher.prepare = hang
        answer = await call(site.app, CHAT, HELLO)
        assert answer.json["choices"][0]["message"]["content"] == TEXT
        assert len(mortal.clients) == 3
        await site.is_idle()


async def test_a_next_host_may_compute_for_longer_than_the_wait_for_it(make_site: SiteMaker) -> None:
    mortal = Mortal(3)
    async with make_site(launcher=mortal.launcher, limits={"continue_within_s": 0.2}) as site:
        prepare = mortal.launcher.prepare

        def slow(client: FakeEngineClient) -> None:
            prepare(client)
            answer = client.answer
            assert answer is not None
            client.answer = lambda submit: [0.5, *answer(submit)]

        mortal.launcher.prepare = slow
        answer = await call(site.app, CHAT, HELLO)
        assert answer.json["choices"][0]["message"]["content"] == TEXT
        await site.is_idle()


async def test_hosts_that_cannot_be_started_end_the_stream(make_site: SiteMaker) -> None:
    mortal = Mortal(3)
    async with make_site(launcher=mortal.launcher) as site:
        mortal.launcher.failures = [OSError("no more processes")] * 3
        answer = await call(site.app, CHAT, STREAMED)
        assert answer.events[-1]["error"]["code"] == "overloaded"
        assert "no more processes" in answer.events[-1]["error"]["message"]
        await site.is_idle()


async def test_a_client_that_leaves_while_its_answer_waits_for_a_host_frees_everything(make_site: SiteMaker) -> None:
    gate = asyncio.Event()
    mortal = Mortal(3, gate=gate)
    async with make_site(launcher=mortal.launcher) as site:
        exchange = start(site.app, CHAT, STREAMED)
        await eventually(lambda: len(mortal.clients) == 2)
        assert site.admission.inflight == 1, "its permit is kept while it waits"
        exchange.disconnect()
        await site.is_idle()
        gate.set()
        await eventually(lambda: not site.app.site.why_not_ready())
        assert mortal.clients[1].submits == []


async def test_the_requests_own_time_limit_holds_while_it_waits(make_site: SiteMaker) -> None:
    mortal = Mortal(3, gate=asyncio.Event())
    async with make_site(launcher=mortal.launcher, limits={"request_timeout_s": 0.3}) as site:
        answer = await call(site.app, CHAT, STREAMED)
        assert answer.events[-1]["error"]["code"] == "request_timeout"
        await site.is_idle()


async def test_a_site_that_drains_continues_nothing(make_server: SiteMaker, model_directory: Path) -> None:
    import httpx

    async with make_server(limits={"drain_timeout_s": 30.0}) as site, httpx.AsyncClient(base_url=site.url) as client:
        site.engine.script = [*says("Hel", finish=None), 30]
        async with client.stream("POST", CHAT, json=STREAMED, timeout=20) as answer:
            lines = answer.aiter_lines()
            async for line in lines:
                if "Hel" in line or '"l"' in line:
                    break
            site.stop.set()
            await eventually(lambda: site.admission.draining)
            site.launcher.hosts[0].die("it was killed")
            rest = [line async for line in lines if line.startswith("data")]
        assert "it was killed" in rest[-1]
        assert all(not host.client.submits for host in site.launcher.hosts[1:])


async def test_a_site_that_stops_wakes_those_that_wait_for_a_host(site: Site) -> None:
    hosts = site.app.site.fleet.hosts[0]
    waiting = asyncio.ensure_future(hosts.next_client(after=hosts.client))
    await asyncio.sleep(0)
    hosts.end("the site is shutting down")
    with pytest.raises(Exception, match="shutting down"):
        await asyncio.wait_for(waiting, 60)
