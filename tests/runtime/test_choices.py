"""Several choices of one request: distinguished by index, counted together, freed together."""

import asyncio
from typing import Any

import pytest

from pilotlight.engine.api.client import EngineError
from tests.asgi import call, eventually, start
from tests.fakes import ids, says
from tests.runtime.conftest import Site, SiteMaker

CHAT = "/ai/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def slowly(text: str, pause_s: float, **options: Any) -> list[Any]:
    return [step for output in says(text, **options) for step in (pause_s, output)]


async def test_each_choice_is_a_sequence_that_waits_for_the_first(site: Site) -> None:
    await call(site.app, CHAT, {**HELLO, "n": 3, "seed": 2**63 - 2, "temperature": 0.5})
    first, *rest = site.engine.submits
    assert first.leader is None
    assert [submit.leader for submit in rest] == [first.sequence_id] * 2
    assert [submit.sampling.seed for submit in site.engine.submits] == [2**63 - 2, 2**63 - 1, 0]
    assert {submit.prompt_token_ids for submit in rest} == {first.prompt_token_ids}
    assert {submit.salt for submit in rest} == {first.salt}


async def test_what_a_choice_takes_is_learnt_of_one_choice(site: Site) -> None:
    """The next request reserves twice the average of one choice for each of its choices."""
    site.engine.answer = lambda submit: says("Hello")  # six tokens
    for _ in range(200):
        await call(site.app, CHAT, {**HELLO, "n": 3})
    assert round(site.app.site.models.states["tiny"].demand.answer_tokens) == 6
    site.engine.answer = lambda submit: [30]
    open_call = start(site.app, CHAT, {**HELLO, "n": 3})
    await eventually(lambda: len(site.engine.open) == 3)
    prompt = len(site.engine.submits[-1].prompt_token_ids)
    assert site.admission.reserved == {"tiny": prompt + 3 * 12}
    open_call.disconnect()
    await open_call.done()
    assert site.admission.reserved == {"tiny": 0}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_choices_come_in_order_with_their_own_ends(site: Site, path: str) -> None:
    site.engine.scripts = [
        slowly("late", 0.01, cached=5),
        says("cut", finish="length", cached=16),
        says("early", cached=16),
    ]
    answer = await call(site.app, path, {**(HELLO if path == CHAT else TEXT), "n": 3})
    choices = answer.json["choices"]
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    assert texts == ["late", "cut", "early"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length", "stop"]
    prompt_tokens = len(site.engine.submits[0].prompt_token_ids)
    assert answer.json["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 5 + 3 + 6,
        "total_tokens": prompt_tokens + 14,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


async def test_streamed_choices_are_interleaved_and_distinguished(site: Site) -> None:
    site.engine.scripts = [slowly("one", 0.01), slowly("three", 0.007)]
    asked = {**HELLO, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    answer = await call(site.app, CHAT, asked)
    *chunks, usage, done = answer.events
    texts, order, ends = {0: "", 1: ""}, [], {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        order.append(choice["index"])
        texts[choice["index"]] += choice["delta"].get("content", "")
        assert choice["index"] not in ends, "nothing comes after a choice's end"
        if choice["finish_reason"]:
            ends[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "one", 1: "three"}
    assert ends == {0: "stop", 1: "stop"}
    assert order != sorted(order), "neither waited for the other's end"
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks].count("assistant") == 2
    assert usage["usage"]["completion_tokens"] == 4 + 6
    assert done == "[DONE]"


@pytest.mark.process
async def test_calls_of_each_choice_are_numbered_from_zero(site: Site) -> None:
    called = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    site.engine.script = says(called * 2)
    answer = await call(site.app, CHAT, {**HELLO, "n": 2, "tools": TOOLS, "stream": True})
    for choice in (0, 1):
        deltas = [e["choices"][0]["delta"] for e in answer.events[:-1] if e["choices"][0]["index"] == choice]
        assert [made["index"] for delta in deltas for made in delta.get("tool_calls", ()) if "id" in made] == [0, 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_one_choice_and_its_sequence_alone(site: Site, stream: bool) -> None:
    may_end = asyncio.Event()
    site.engine.scripts = [[*says("go on", finish=None), may_end, *says(" END")], [*says("no END x", finish=None), 30]]
    exchange = start(site.app, CHAT, {**HELLO, "n": 2, "stop": "END", "stream": stream})
    await eventually(
        lambda: len(site.engine.submits) == 2 and site.engine.aborted == [site.engine.submits[1].sequence_id]
    )
    assert site.engine.open == {site.engine.submits[0].sequence_id}
    may_end.set()
    answer = await exchange.done()
    if not stream:
        assert [choice["message"]["content"] for choice in answer.json["choices"]] == ["go on ", "no "]
        assert answer.json["usage"]["completion_tokens"] == len("go on END") + len("no END")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_every_choice(site: Site, stream: bool) -> None:
    site.engine.script = [*says("Hel", finish=None), 30]
    exchange = start(site.app, CHAT, {**HELLO, "n": 4, "stream": stream})
    await eventually(lambda: len(site.engine.open) == 4)
    assert site.admission.inflight == 1
    exchange.disconnect()
    await site.is_idle()
    assert sorted(site.engine.aborted) == sorted(submit.sequence_id for submit in site.engine.submits)


async def test_one_choice_that_fails_ends_the_request_and_the_others(site: Site) -> None:
    site.engine.scripts = [
        [*says("a", finish=None), 30],
        [*says("b", finish=None), 0.01, EngineError("engine_error", "bad")],
    ]
    answer = await call(site.app, CHAT, {**HELLO, "n": 2, "stream": True})
    assert answer.events[-1]["error"]["message"] == "bad"
    await site.is_idle()
    assert site.engine.aborted == [site.engine.submits[0].sequence_id]
    site.engine.scripts = [[*says("a", finish=None), 30], [EngineError("overloaded", "full")]]
    refused = await call(site.app, CHAT, {**HELLO, "n": 2, "stream": True})
    assert refused.status == 503 or refused.events[-1]["error"]["code"] == "overloaded"


async def test_tokens_are_reserved_for_every_choice(make_site: SiteMaker) -> None:
    async with make_site() as site:
        site.engine.script = [*says("Hel", finish=None), 30]
        exchange = start(site.app, COMPLETIONS, {**TEXT, "n": 3, "max_tokens": 20})
        await eventually(lambda: len(site.engine.open) == 3)
        assert site.admission.reserved == {"tiny": len(ids("Hi")) + 3 * 20}
        several = start(site.app, COMPLETIONS, {**TEXT, "prompt": ["Hi", "Hey"], "n": 2, "max_tokens": 20})
        await eventually(lambda: len(site.engine.open) == 3 + 4)
        assert site.admission.reserved == {"tiny": len(ids("Hi")) + 3 * 20 + len(ids("HiHey")) + 4 * 20}
        several.disconnect()
        exchange.disconnect()
        await site.is_idle()


async def test_the_native_path_gives_one_answer(site: Site) -> None:
    answer = await call(site.app, "/client/v4/accounts/a/ai/run/tiny", {"prompt": "Hi", "n": 2})
    assert answer.status == 400
    assert "one answer per request" in answer.json["errors"][0]["message"]


async def test_no_choice_is_asked_for_more_tokens_than_the_context_has_room_for(site: Site) -> None:
    assert (await call(site.app, CHAT, {**HELLO, "n": 2, "max_tokens": 100_000})).status == 200
    room = {512 - len(submit.prompt_token_ids) for submit in site.engine.submits}
    assert {submit.sampling.max_tokens for submit in site.engine.submits} == room


async def test_several_prompts_have_their_choices_one_prompt_after_the_other(site: Site) -> None:
    site.engine.scripts = [slowly("one", 0.01, cached=5), says("two"), says("three", cached=2), says("four", cached=9)]
    body = {**TEXT, "prompt": ["first", list(ids("second"))], "n": 2, "seed": 7, "echo": True}
    answer = await call(site.app, COMPLETIONS, body)
    assert [choice["text"] for choice in answer.json["choices"]] == [
        "firstone",
        "firsttwo",
        "secondthree",
        "secondfour",
    ]
    assert [choice["index"] for choice in answer.json["choices"]] == [0, 1, 2, 3]
    submits = site.engine.submits
    assert [submit.prompt_token_ids for submit in submits] == [ids("first")] * 2 + [ids("second")] * 2
    assert [submit.leader for submit in submits] == [None, submits[0].sequence_id, None, submits[2].sequence_id]
    assert [submit.sampling.seed for submit in submits] == [7, 8, 7, 8]
    usage = answer.json["usage"]
    assert usage["prompt_tokens"] == len(ids("first")) + len(ids("second"))
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5 + 2}
    assert usage["completion_tokens"] == len("onetwothreefour") + 4
