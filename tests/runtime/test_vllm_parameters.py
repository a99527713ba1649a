"""Parameters of vLLM and SGLang that other dialects lack, and values that only OpenAI and few others accept."""

from typing import Any

import pytest

from pilotlight.dialects.body.bodies import LEAST_TOP_P
from pilotlight.engine.api.protocol import Constraint
from tests.asgi import call
from tests.fakes import ids, says
from tests.runtime.conftest import Site

CHAT, TEXT, RUN = "/v1/chat/completions", "/v1/completions", "/client/v4/accounts/acc1/ai/run/@test/tiny"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
ONCE: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time"}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_a_stop_string_is_part_of_the_answer_where_that_is_wanted(site: Site, is_streamed: bool) -> None:
    site.engine.script = says("Hello, world")
    for shown, text in ((False, "Hel"), (True, "Hello,")):
        body = {**ONCE, "stop": ["lo,"], "include_stop_str_in_output": shown, "stream": is_streamed}
        answer = await call(site.app, TEXT, body)
        choices = [event["choices"][0] for event in answer.events[:-1]] if is_streamed else answer.json["choices"]
        assert "".join(choice["text"] for choice in choices) == text
        assert choices[-1]["finish_reason"] == "stop"


async def test_a_prompts_last_tokens_are_read_where_it_is_to_be_truncated(site: Site) -> None:
    whole = ids(ONCE["prompt"])
    for most, read in ((4, whole[-4:]), (100, whole), (-1, whole)):
        assert (await call(site.app, TEXT, {**ONCE, "truncate_prompt_tokens": most})).status == 200
        assert site.engine.submits[-1].prompt_token_ids == read
    long = {**HELLO, "messages": [{"role": "user", "content": "x" * 6000}]}
    answer = await call(site.app, CHAT, {**long, "truncate_prompt_tokens": -1, "max_tokens": 50})
    assert (answer.status, answer.json["usage"]["prompt_tokens"]) == (200, 512 - 50)
    assert site.engine.submits[-1].prompt_token_ids[-14:] == ids("x<|im_end|>\n<|im_start|>assistant\n")[-14:]
    assert (await call(site.app, CHAT, long)).json["error"]["code"] == "context_length_exceeded"
    assert (await call(site.app, CHAT, {**HELLO, "truncate_prompt_tokens": 0})).json["error"][
        "param"
    ] == "truncate_prompt_tokens"


async def test_a_cache_salt_parts_what_requests_of_one_tenant_share(site: Site) -> None:
    for salt in ({}, {"cache_salt": ""}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}):
        assert (await call(site.app, CHAT, {**HELLO, **salt})).status == 200
    assert (await call(site.app, CHAT, {**HELLO, "cache_salt": "a"}, authorization="Bearer other")).status == 200
    none, empty, first, second, again, other = [submit.salt for submit in site.engine.submits]
    assert (none, first) == (empty, again)
    assert len({none, first, second, other}) == 4
    assert {len(salt) for salt in (none, first)} == {16}


@pytest.mark.process
@pytest.mark.parametrize("path", [CHAT, RUN])
async def test_sglangs_names_say_what_an_answer_must_be(site: Site, path: str) -> None:
    for fields in ({"regex": "[0-9]{3}"}, {"json_schema": '{"type":"object"}'}, {"json_schema": {"type": "object"}}):
        assert (await call(site.app, path, {**HELLO, **fields})).status == 200
    found = [submit.constraint for submit in site.engine.submits]
    assert found == [Constraint("regex", "[0-9]{3}"), *[Constraint("json_schema", '{"type":"object"}')] * 2]
    refused = await call(site.app, CHAT, {**HELLO, "ebnf": "root ::= 'a'"})
    assert "Lark" in refused.json["error"]["message"]


async def test_values_that_openai_takes_are_taken(site: Site) -> None:
    for path, body in (
        (CHAT, HELLO),
        ("/v1/messages", {**HELLO, "max_tokens": 9}),
        ("/v1/responses", {"model": "tiny", "input": "Hi"}),
    ):
        assert (await call(site.app, path, {**body, "top_p": 0})).status == 200
    assert [submit.sampling.top_p for submit in site.engine.submits] == [LEAST_TOP_P] * 3
    for stop in ("", [""], ["", "zz"]):
        assert (await call(site.app, CHAT, {**HELLO, "stop": stop})).json["choices"][0]["message"][
            "content"
        ] == "Hello, world"
