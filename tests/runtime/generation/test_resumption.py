"""A stream from another site continues here at any place without a visible difference (I3, I8). Only routers may request this."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pilotlight.edge_router.forwarding.relay import DeliveryLog, Forward, StreamRelay
from pilotlight.engine.api.protocol import PRIORITIES, Submit, TokenLogprobs, TokenOutput
from pilotlight.wire.hop.continuation import (
    ANSWER,
    DRAIN_NOTICE,
    AnswerName,
    Delivered,
    Delivery,
    encode_answer,
    encode_delivery,
)
from pilotlight.wire.hop.headers import HOP, Hop, sign_hop
from pilotlight.wire.sse import Event, EventDecoder
from tests.asgi import call, start
from tests.fakes import CHATML, EOS, FakeEngineClient, FakeLauncher, Step, ids
from tests.in_turn import in_turn
from tests.runtime.conftest import Site, SiteMaker

CHAT, COMPLETIONS, RUN = "/ai/v1/chat/completions", "/ai/v1/completions", "/client/v4/accounts/acc1/ai/run/@test/tiny"
# Paths of the dialects whose answers consist of blocks, and the fields that their requests need.
BLOCKS = {"/v1/messages": {"max_tokens": 200}, "/v1/responses": {}, RUN: {}}
SECRET = "a shared secret"
NAME = AnswerName(41, 1_700_000_000, "0123456789abcdef01234567")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALLS = (
    'Ok. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)
THOUGHT = "<think>\nHm. END?\n</think>\n\n"
MESSAGES = [{"role": "user", "content": "Hi"}]
ASKED = {"model": "tiny", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
TOLD = {"model": "tiny", "prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}

CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "characters of several tokens": (CHAT, ASKED, ("Gr\u00fc\u00dfe, \u65e5\u672c \U0001f389!",)),
    "a stop string that nearly comes twice": (CHAT, {**ASKED, "stop": ["calmer", "zz"]}, ("calm, calme, z calmer x",)),
    "tool calls": (CHAT, {**ASKED, "tools": TOOLS}, (CALLS,)),
    "log-probabilities of text that is held back": (
        CHAT,
        {**ASKED, "logprobs": True, "top_logprobs": 1, "stop": ["\u65e5x"], "tools": TOOLS},
        ("a \u65e5\u00e9 <tool b \u65e5x",),
    ),
    "three choices": (CHAT, {**ASKED, "n": 3}, ("First.", "The second", "3")),
    "an end by length": (CHAT, {**ASKED, "max_tokens": 5}, ("abcdefgh",)),
    "an echo with log-probabilities of two choices": (
        COMPLETIONS,
        {**TOLD, "n": 2, "echo": True, "logprobs": 1, "stop": "qq"},
        ("q qr\u00e9", "other"),
    ),
    "an echo of two prompts with two choices each": (
        COMPLETIONS,
        {**TOLD, "prompt": ["Once", "Twice"], "n": 2, "echo": True, "logprobs": 1, "stop": "qq"},
        ("q qr\u00e9", "other"),
    ),
    "a plain completion": (COMPLETIONS, TOLD, ("upon a time",)),
    "the Workers AI dialect": (RUN, {"messages": MESSAGES, "stream": True, "tools": TOOLS}, (CALLS,)),
    "reasoning": (CHAT, {**ASKED, "stop": "END"}, (THOUGHT + "It is. END",)),
    "reasoning and calls in the Workers AI dialect": (
        RUN,
        {"messages": MESSAGES, "stream": True, "tools": TOOLS},
        (THOUGHT + CALLS,),
    ),
    "reasoning and calls with log-probabilities": (
        CHAT,
        {**ASKED, "logprobs": True, "tools": TOOLS},
        (THOUGHT + CALLS,),
    ),
}
# Calls in further formats.
CALLED = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n x\n</parameter>\n</function>\n</tool_call>",
    "kimi_k2": (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        '<|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{"a": NaN}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "harmony": '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|>',
    "pythonic": "[f(a=1, s='x y'), f()]",
}


def sample(texts: tuple[str, ...]) -> Any:
    """An engine whose choice i generates text i. Its outputs depend only on position, seed and delivered tokens."""

    def answer(submit: Submit) -> Iterable[Step]:
        choice = submit.sampling.seed - NAME.seed
        tokens = (*ids(texts[choice]), EOS)
        done, limit = submit.num_delivered_tokens, submit.num_delivered_tokens + submit.sampling.max_tokens
        for position in range(done, min(limit, len(tokens))):
            is_end, is_limit = position == len(tokens) - 1, position == limit - 1
            logprob = TokenLogprobs(-position / 8, ((tokens[position], -position / 8),))
            prompt = tuple(TokenLogprobs(-i / 8, ((1, -1.0),)) for i in range(len(submit.prompt_token_ids) - 1))
            yield TokenOutput(
                "",
                (tokens[position],),
                "stop" if is_end else "length" if is_limit else None,
                7 if position == done == 0 else 90 if position == done else None,
                logprobs=(logprob,) if submit.sampling.num_logprobs is not None else None,
                prompt_logprobs=prompt if position == done and submit.sampling.prompt_logprobs else None,
            )
            yield 0.0

    return answer


ASKED_WHOLE = {"model": "tiny", "messages": MESSAGES}


def signature(secret: str, path: str, body: bytes, request_id: str = "r1") -> str:
    return sign_hop(secret, time.time(), Hop("POST", path, request_id, "ams1"), body)


def hop(path: str, body: dict[str, Any], delivery: bytes = b"", request_id: str = "r1") -> dict[str, str]:
    signed = signature(SECRET, path, delivery + json.dumps(body).encode(), request_id)
    return {HOP: signed, "x-request-id": request_id, ANSWER: encode_answer(NAME, delivery)}


async def stream(site: Site, path: str, body: dict[str, Any], delivery: bytes = b"") -> list[Event]:
    """Return the events that the site sends to a router."""
    raw = delivery + json.dumps(body).encode()
    exchange = await call(site.app, path, body=raw, **hop(path, body, delivery))
    assert exchange.status == 200, exchange.body
    assert exchange.headers["x-pilotlight-marks"] == "1"
    return EventDecoder().feed(exchange.body)


def relayed(log: DeliveryLog, events: list[Event]) -> bytes:
    """Return the bytes that a router sends to its client for a site's stream."""
    relay = StreamRelay(log, is_resumable=True)
    told = [each for event in events for each in relay.feed(event.raw)]
    return b"".join(each.data for each in told if isinstance(each, Forward))


def told(client: bytes) -> dict[str, Any]:
    """Return all content that a client gets of an answer, however it is split into events."""
    names: set[Any] = set()
    answer: dict[str, Any] = {"usage": None, "choices": {}}
    events = EventDecoder().feed(client)
    assert events[-1].is_done
    for event in events[:-1]:
        fields = json.loads(event.data or b"")
        answer["usage"] = fields.get("usage") or answer["usage"]
        names.add((fields.get("id"), fields.get("created"), fields.get("model")))
        for choice in fields.get("choices", [{"delta": fields, "index": 0}]):
            mine = answer["choices"].setdefault(
                choice["index"], {"text": "", "reasoning": "", "calls": [], "roles": 0, "logprobs": {}}
            )
            delta = choice.get("delta", choice)
            mine["text"] += delta.get("content") or delta.get("response") or delta.get("text") or ""
            mine["reasoning"] += delta.get("reasoning_content") or ""
            for item in delta.get("tool_calls") or ():
                _add_call(mine["calls"], item)
            mine["roles"] += "role" in delta
            mine["finish"] = choice.get("finish_reason")
            for key, values in (choice.get("logprobs") or {}).items():
                mine["logprobs"].setdefault(key, []).extend(values or ())
    assert len(names) == 1, names
    answer["name"] = names.pop()
    return answer


def _add_call(calls: list[Any], item: dict[str, Any]) -> None:
    """Add a delta with a part of a call. In Workers AI's dialect a call is a single delta."""
    if "index" not in item:
        calls.append(item)
    elif item["index"] == len(calls):
        assert item["id"]
        calls.append(dict(item["function"]))
    else:
        calls[item["index"]]["arguments"] += item["function"]["arguments"]


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
async def test_a_stream_continues_wherever_it_was_cut(make_site: SiteMaker, model_directory: Path, case: str) -> None:
    (model_directory / "chat_template.jinja").write_text(CHATML + "{# <think> #}")
    path, body, texts = CASES[case]
    await assert_goes_on(make_site, path, body, texts)


@pytest.mark.process
@pytest.mark.parametrize("name", CALLED)
async def test_calls_of_every_format_continue_wherever_they_were_cut(
    make_site: SiteMaker, model_directory: Path, name: str
) -> None:
    models = [{"name": "tiny", "source": str(model_directory), "aliases": ["@test/tiny"], "tool_format": name}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}}}}}]
    for path, body in ((CHAT, ASKED), (RUN, {"messages": MESSAGES, "stream": True})):
        await assert_goes_on(make_site, path, {**body, "tools": tools}, (CALLED[name],), models=models)


BLOCK_TEXTS = {
    "text and calls": CALLS,
    "reasoning": THOUGHT + "It is. \u65e5",
    "reasoning and calls": THOUGHT + CALLS,
    "calls alone": CALLS.removeprefix("Ok. "),
}


@pytest.mark.process
@pytest.mark.parametrize(("path", "case"), in_turn(BLOCKS, BLOCK_TEXTS))
async def test_an_answer_of_blocks_continues_wherever_it_was_cut(
    make_site: SiteMaker, model_directory: Path, path: str, case: str
) -> None:
    (model_directory / "chat_template.jinja").write_text(CHATML + "{# <think> #}")
    tools = (
        [{"name": "f", "input_schema": {"type": "object"}}]
        if path == "/v1/messages"
        else [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    )
    asked = {"messages": MESSAGES} if path == "/v1/messages" else {"input": "Hi"}
    for limit in ({}, {"max_tokens" if path == "/v1/messages" else "max_output_tokens": 20}):
        body = {"model": "tiny", "stream": True, "tools": tools, **asked, **BLOCKS[path], **limit}
        await assert_goes_on(make_site, path, body, (BLOCK_TEXTS[case],), read=told_blocks)


def told_blocks(client: bytes) -> list[dict[str, Any]]:
    """Return the events with adjacent deltas merged. Check that event numbers, if any, have no gap."""
    told: list[dict[str, Any]] = []
    numbers: list[int] = []
    for event in EventDecoder().feed(client):
        if event.data is None:
            continue
        fields = json.loads(event.data)
        assert (event.name or b"").decode() == fields["type"]
        if "sequence_number" in fields:
            numbers.append(fields.pop("sequence_number"))
        delta = fields.get("delta")
        last = told[-1] if told else {}
        if (
            fields["type"].endswith("delta")
            and last.get("type") == fields["type"]
            and "stop_reason" not in fields["delta"]
        ):
            if isinstance(delta, str):
                last["delta"] += delta
            else:
                for name in delta.keys() - {"type"}:
                    last["delta"][name] += delta[name]
        else:
            told.append(fields)
    assert numbers == list(range(len(numbers)))
    return told


async def assert_goes_on(
    make_site: SiteMaker,
    path: str,
    body: dict[str, Any],
    texts: tuple[str, ...],
    read: Callable[[bytes], Any] = told,
    **tables: Any,
) -> None:
    """Cut a stream after each of its events, continue it, and compare the client's text with that of the uncut stream."""
    async with make_site(hop_secret=SECRET, **tables) as site:
        site.engine.answer = sample(texts)
        events = await stream(site, path, body)
        undisturbed = read(relayed(DeliveryLog(), events))
        cuts = 0
        for length in range(len(events)):  # an incomplete event at the end changes nothing
            log = DeliveryLog()
            client = relayed(log, events[:length])
            client += relayed(log, await stream(site, path, body, log.delivery()))
            assert b":pl" not in client
            continued = read(client)
            assert continued == undisturbed, f"cut after {length} events"
            cuts += bool(log.num_tokens)
        assert cuts >= min(len(events) - 1, 3)
        await site.is_idle()


async def test_what_is_left_is_submitted_behind_what_was_delivered(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        site.engine.answer = sample(("abcdef", "xyz"))
        delivery = encode_delivery(Delivery((Delivered(ids("abc")), Delivered((*ids("xyz"), EOS), "stop")), 7))
        events = await stream(site, CHAT, {**ASKED, "n": 2, "max_tokens": 50}, delivery)
        (submit,) = site.engine.submits
        assert submit.prompt_token_ids[-3:] == ids("abc")
        assert (submit.num_delivered_tokens, submit.sampling.max_tokens) == (3, 47)
        assert (submit.sampling.seed, submit.priority) == (NAME.seed, PRIORITIES[0])
        usage = json.loads(events[-2].data or b"")["usage"]
        assert (usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (7 + 4, 7)
        metrics = (await call(site.app, "/metrics")).body.decode()
        assert 'vllm:generation_tokens_total{model_name="tiny"} 4.0' in metrics, "the rest was made elsewhere"
        await site.is_idle()


async def test_a_long_answer_is_replayed_like_a_short_one(make_site: SiteMaker) -> None:
    text = "ab " * 600

    def prepare(client: FakeEngineClient) -> None:
        client.context_length, client.answer = 4096, sample((text,))

    async with make_site(launcher=FakeLauncher(prepare), hop_secret=SECRET) as site:
        events = await stream(site, CHAT, ASKED, encode_delivery(Delivery((Delivered(ids(text[:-2])),))))
        rest = [json.loads(event.data or b"") for event in events[:-2]]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in rest) == text[-2:]


async def test_the_answers_name_and_random_numbers_come_from_the_router_unless_the_client_has_a_seed(
    make_site: SiteMaker,
) -> None:
    async with make_site(hop_secret=SECRET) as site:
        first = await call(site.app, CHAT, ASKED_WHOLE, **hop(CHAT, ASKED_WHOLE))
        await call(site.app, CHAT, ASKED_WHOLE | {"seed": 5}, **hop(CHAT, ASKED_WHOLE | {"seed": 5}))
        assert [submit.sampling.seed for submit in site.engine.submits] == [NAME.seed, 5]
        assert (first.json["id"], first.json["created"]) == (f"chatcmpl-{NAME.nonce}", NAME.created)
        await site.is_idle()


async def test_a_client_that_asks_the_site_itself_sees_no_marks(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        signed = {HOP: signature(SECRET, CHAT, json.dumps(ASKED).encode()), "x-request-id": "r1"}
        for headers in ({}, signed):  # a router that does not ask for resume points gets none
            answer = await call(site.app, CHAT, ASKED, **headers)
            assert "x-pilotlight-marks" not in answer.headers
            assert b":pl" not in answer.body


FORGED_BODY = encode_delivery(Delivery((Delivered((1, 2)),))) + json.dumps(ASKED).encode()
FORGED = {
    "no signature": {},
    "another secret": {HOP: signature("guess", CHAT, FORGED_BODY), "x-request-id": "r1"},
    "another path": {HOP: signature(SECRET, RUN, FORGED_BODY), "x-request-id": "r1"},
    "another request": {HOP: signature(SECRET, CHAT, FORGED_BODY, "r2"), "x-request-id": "r1"},
    "another body": {HOP: signature(SECRET, CHAT, FORGED_BODY + b" "), "x-request-id": "r1"},
}


@pytest.mark.parametrize("forgery", FORGED)
async def test_a_continuation_that_no_router_signed_is_refused(make_site: SiteMaker, forgery: str) -> None:
    delivery = encode_delivery(Delivery((Delivered((1, 2)),)))
    async with make_site(hop_secret=SECRET) as site:
        headers = {**FORGED[forgery], ANSWER: encode_answer(NAME, delivery)}
        answer = await call(site.app, CHAT, body=delivery + json.dumps(ASKED).encode(), **headers)
        assert (answer.status, answer.json["error"]["code"]) == (403, "forbidden")
        assert not site.engine.submits


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_a_name_that_no_router_gave_is_not_heard(make_site: SiteMaker, secret: str | None) -> None:
    async with make_site(hop_secret=secret) as site:
        answer = await call(site.app, CHAT, ASKED, **{ANSWER: encode_answer(NAME)})
        assert answer.status == 200
        assert "x-pilotlight-marks" not in answer.headers
        assert b":pl" not in answer.body
        assert NAME.nonce.encode() not in answer.body
        assert site.engine.submits[0].sampling.seed != NAME.seed


async def test_without_a_secret_no_caller_may_continue_an_answer(site: Site) -> None:
    delivery = encode_delivery(Delivery((Delivered((1, 2)),)))
    raw = delivery + json.dumps(ASKED).encode()
    answer = await call(site.app, CHAT, body=raw, **hop(CHAT, ASKED, delivery))
    assert (answer.status, answer.json["error"]["code"]) == (403, "forbidden")


DONE = Delivered((1,), "stop")
MALFORMED: dict[str, tuple[str, bytes]] = {
    "a header of another form": ("1.2", b""),
    "a seed of 64 bits": (f"{2**63}.1.{NAME.nonce}", b""),
    "a length beyond the body": (f"{encode_answer(NAME)}.99999", b"[[]]"),
    "no JSON": (encode_answer(NAME, b"[["), b"[["),
    "a negative token": (encode_answer(NAME, b"[[[[-1],null]],0]"), b"[[[[-1],null]],0]"),
    "more choices than asked for": ("", encode_delivery(Delivery((DONE, DONE)))),
    "nothing left": ("", encode_delivery(Delivery((DONE,)))),
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_continuation_is_refused_in_one_sentence(make_site: SiteMaker, case: str) -> None:
    value, delivery = MALFORMED[case]
    async with make_site(hop_secret=SECRET) as site:
        headers = {**hop(CHAT, ASKED, delivery), **({ANSWER: value} if value else {})}
        answer = await call(site.app, CHAT, body=delivery + json.dumps(ASKED).encode(), **headers)
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
        assert not site.engine.submits
        await site.is_idle()


@pytest.mark.parametrize(
    ("delivered", "body"),
    [(Delivered(ids("ab stop")), {**ASKED, "stop": "stop"}), (Delivered(ids("abcdef")), {**ASKED, "max_tokens": 6})],
)
async def test_an_answer_that_should_have_ended_here_is_not_continued(
    make_site: SiteMaker, delivered: Delivered, body: dict[str, Any]
) -> None:
    async with make_site(hop_secret=SECRET) as site:
        delivery = encode_delivery(Delivery((delivered,)))
        answer = await call(site.app, CHAT, body=delivery + json.dumps(body).encode(), **hop(CHAT, body, delivery))
        assert (answer.status, answer.json["error"]["code"]) == (500, "engine_error")
        assert "cannot be continued at this site" in answer.json["error"]["message"]
        await site.is_idle()


@pytest.mark.process
async def test_an_engine_that_takes_another_way_is_noticed_where_tokens_come_again(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        site.engine.answer = sample(("ab  X",))
        body = {**ASKED, "tools": TOOLS, "logprobs": True}
        delivery = encode_delivery(Delivery((Delivered(ids("ab\tL")),)))
        # the first site held the tab back until the L made it text, so this site cannot compare it
        answer = await call(site.app, CHAT, body=delivery + json.dumps(body).encode(), **hop(CHAT, body, delivery))
        assert answer.status == 200
        held = encode_delivery(Delivery((Delivered(ids("abz\t")),)))
        answer = await call(site.app, CHAT, body=held + json.dumps(body).encode(), **hop(CHAT, body, held))
        assert answer.json["error"]["code"] == "engine_error"
        assert "had been shown" in answer.json["error"]["message"]
        await site.is_idle()


async def test_a_site_that_drains_notifies_the_router_and_not_a_client(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        site.engine.answer = lambda submit: [TokenOutput("", ids("a")), 30.0]
        routed, plain = start(site.app, CHAT, ASKED, **hop(CHAT, ASKED)), start(site.app, CHAT, ASKED)
        await routed.until(b'"a"')
        await plain.until(b'"a"')
        site.admission.drain()
        await routed.until(DRAIN_NOTICE)
        assert b":pl" not in plain.body
        routed.disconnect()
        plain.disconnect()
        await routed.done()
        await plain.done()
        await site.is_idle()
