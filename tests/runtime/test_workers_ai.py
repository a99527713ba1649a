"""Cloudflare Workers AI's own paths."""

from pathlib import Path
from typing import Any

import pytest

from tests.asgi import call
from tests.fakes import ids, says
from tests.runtime.conftest import Site, SiteMaker

RUN = "/client/v4/accounts/acc1/ai/run/@test/tiny"
CALL_TEXT = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


async def test_a_prompt_is_answered_in_an_envelope(site: Site) -> None:
    site.engine.script = says("Hello", cached=2)
    answer = await call(site.app, RUN, {"prompt": "Hi"})
    assert answer.status == 200
    body = answer.json
    assert (body["success"], body["errors"], body["messages"]) == (True, [], [])
    assert body["result"]["response"] == "Hello"
    assert body["result"]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert site.engine.submits[0].prompt_token_ids == ids("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


async def test_a_raw_prompt_is_continued_as_it_is(site: Site) -> None:
    await call(site.app, RUN, {"prompt": "Once", "raw": True})
    assert site.engine.submits[0].prompt_token_ids == ids("Once")


async def test_a_stream_of_responses_ends_with_usage_and_done(site: Site) -> None:
    answer = await call(
        site.app, RUN, {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 20}
    )
    *events, last, done = answer.events
    assert done == "[DONE]"
    assert "".join(event["response"] for event in events) == "Hello, world"
    assert last["response"] == ""
    assert last["usage"]["completion_tokens"] == 13
    assert site.engine.submits[0].sampling.max_tokens == 20


async def test_an_answer_has_256_tokens_where_neither_request_nor_model_says_how_many(
    make_site: SiteMaker, model_directory: Path
) -> None:
    tiny: dict[str, Any] = {"name": "tiny", "source": str(model_directory)}
    for said, most in (({}, 256), ({"default_max_tokens": 300}, 300)):
        async with make_site(models=[{**tiny, **said}]) as site:
            run = RUN.replace("@test/tiny", "tiny")
            messages = [{"role": "user", "content": "Hi"}]
            for body in (
                {"prompt": "Hi"},
                {"prompt": "Hi", "max_tokens": None},
                {"messages": messages, "stream": True},
            ):
                assert (await call(site.app, run, body)).status == 200
            for further in ({"max_tokens": 301}, {"min_tokens": 302}):
                assert (await call(site.app, run, {"prompt": "Hi", **further})).status == 200
            assert [submit.sampling.max_tokens for submit in site.engine.submits] == [most, most, most, 301, 302]
            room = site.engine.context_length - 450
            assert (await call(site.app, run, {"prompt": "x" * 450, "raw": True})).status == 200
            assert site.engine.submits[-1].sampling.max_tokens == room


@pytest.mark.process
async def test_tools_come_in_either_form_and_calls_carry_objects(site: Site) -> None:
    site.engine.script = says(CALL_TEXT)
    for tool in ({"name": "f", "parameters": {}}, {"type": "function", "function": {"name": "f"}}):
        answer = await call(site.app, RUN, {"prompt": "Hi", "tools": [tool]})
        assert answer.json["result"]["tool_calls"] == [{"name": "f", "arguments": {"a": 1}}]
        assert answer.json["result"]["response"] == ""
    streamed = await call(site.app, RUN, {"prompt": "Hi", "tools": [{"name": "f"}], "stream": True})
    assert streamed.events[0]["tool_calls"] == [{"name": "f", "arguments": {"a": 1}}]


@pytest.mark.process
async def test_arguments_reach_the_client_as_they_were_written(site: Site) -> None:
    """They are on one line and keep numbers of any size, such as one that exceeds a float and one that exceeds 64 bits."""
    written = '{\n"a": 1e999,\n"b": 123456789012345678901234567890}'
    site.engine.script = says(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>')
    tools = [{"name": "f"}]
    whole = await call(site.app, RUN, {"prompt": "Hi", "tools": tools})
    streamed = await call(site.app, RUN, {"prompt": "Hi", "tools": tools, "stream": True})
    for body in (whole.body, streamed.body):
        assert b'"arguments":{ "a": 1e999, "b": 123456789012345678901234567890}' in body


@pytest.mark.process
@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
async def test_an_answer_that_is_asked_for_as_json_is_a_document(site: Site, kind: str) -> None:
    asked = {"prompt": "Hi", "response_format": {"type": kind, "json_schema": {"type": "object"}}}
    site.engine.scripts = [says('{"a":\n[1e400, "\u00e9"]}'), says('{"a":'), says('{"a": 1}'), says('{"a": 1}')]
    whole = await call(site.app, RUN, asked)
    assert b'"response":{"a":\n[1e400, "\xc3\xa9"]}' in whole.body
    assert (await call(site.app, RUN, asked)).json["result"]["response"] == '{"a":', "it was cut short"
    told = (await call(site.app, RUN, asked)).json["result"]
    assert (told["response"], told["finish_reason"]) == ({"a": 1}, "stop")
    events = (await call(site.app, RUN, {**asked, "stream": True})).events
    assert "".join(event["response"] for event in events[:-1]) == '{"a": 1}'


async def test_errors_have_the_dialects_codes(site: Site) -> None:
    missing = await call(site.app, "/client/v4/accounts/acc1/ai/run/@cf/nope", {"prompt": "Hi"})
    assert (missing.status, missing.json["errors"][0]["code"], missing.json["success"]) == (400, 5007, False)
    bad = await call(site.app, RUN, {"prompt": 3})
    assert (bad.status, bad.json["errors"][0]["code"]) == (400, 5004)
    assert "prompt" in bad.json["errors"][0]["message"]
    neither = await call(site.app, RUN, {})
    assert "either prompt or messages" in neither.json["errors"][0]["message"]
    queued = await call(site.app, RUN + "?queueRequest=true", {"prompt": "Hi"})
    assert "queueRequest" in queued.json["errors"][0]["message"]
    long = await call(site.app, RUN, {"prompt": "x" * 600})
    assert (long.status, long.json["errors"][0]["code"]) == (413, 3006)
    unknown = await call(site.app, "/client/v4/accounts/acc1/nothing")
    assert (unknown.status, unknown.json["errors"][0]["code"]) == (404, 3042)


async def test_accounts_are_tenants(site: Site) -> None:
    await call(site.app, RUN, {"prompt": "Hi"})
    await call(site.app, RUN.replace("acc1", "acc2"), {"prompt": "Hi"})
    first, second = (submit.salt for submit in site.engine.submits)
    assert first != second


async def test_models_can_be_searched(site: Site) -> None:
    found = await call(site.app, "/client/v4/accounts/acc1/ai/models/search?search=tiny")
    assert [model["name"] for model in found.json["result"]] == ["tiny"]
    assert found.json["result"][0]["task"]["name"] == "Text Generation"
    nothing = await call(site.app, "/client/v4/accounts/acc1/ai/models/search?search=zzz")
    assert nothing.json["result"] == []


async def test_a_list_of_models_has_pages_and_an_end(make_site: SiteMaker, model_directory: Path) -> None:
    models = [{"name": name, "source": str(model_directory), "residency": "disk"} for name in ("a1", "a2", "b1")]
    async with make_site(models=models) as site:

        async def page(query: str) -> tuple[list[str], Any]:
            answer = (await call(site.app, f"/client/v4/accounts/acc1/ai/models/search?{query}")).json
            return [model["name"] for model in answer["result"]], answer["result_info"]

        info = {"page": 1, "per_page": 50, "count": 3, "total_count": 3}
        assert await page("") == (["a1", "a2", "b1"], info)
        assert await page("page=2") == ([], {**info, "page": 2, "count": 0})
        pages = [(await page(f"per_page=2&page={number}"))[0] for number in (1, 2, 3, 999_999_999)]
        assert pages == [["a1", "a2"], ["b1"], [], []]
        assert (await page("search=A&per_page=1&page=2"))[0] == ["a2"]
        assert len((await page("task=text%20generation"))[0]) == 3
        assert (await page("task=Text+Embeddings"))[0] == []
        for wrong in ("page=0", "page=x", "per_page=-1", "per_page=", "page=1e3"):
            refused = await call(site.app, f"/client/v4/accounts/acc1/ai/models/search?{wrong}")
            assert (refused.status, refused.json["success"]) == (400, False)
            assert wrong.split("=")[0] in refused.json["errors"][0]["message"]


@pytest.mark.process
async def test_the_reason_of_an_answers_end_is_reported(site: Site) -> None:
    for text, finish, reason in (
        ("Hello", "stop", "stop"),
        ("Hello", "length", "length"),
        (CALL_TEXT, "stop", "tool_calls"),
    ):
        site.engine.script = says(text, finish=finish)
        whole = await call(site.app, RUN, {"prompt": "Hi", "tools": [{"name": "f"}]})
        assert whole.json["result"]["finish_reason"] == reason
        streamed = await call(site.app, RUN, {"prompt": "Hi", "tools": [{"name": "f"}], "stream": True})
        assert [event.get("finish_reason") for event in streamed.events[:-1]][-1] == reason


async def test_a_request_may_refuse_to_wait(make_site: SiteMaker) -> None:
    async with make_site(limits={"max_inflight": 1}) as site:
        assert (await call(site.app, RUN + "?rejectIfBusy=true", {"prompt": "Hi"})).status == 200
        for query, sentence in (("rejectIfBusy=true", "asked not to wait"), ("rejectIfBusy=false", "as many")):
            with site.admission.permit():
                refused = await call(site.app, f"{RUN}?{query}", {"prompt": "Hi"})
            assert (refused.status, refused.json["errors"][0]["code"]) == (429, 3040)
            assert ("asked not to wait" in refused.json["errors"][0]["message"]) is (sentence == "asked not to wait")
            assert "retry-after" in refused.headers


async def test_tasks_schemas_and_tokens_are_returned_in_envelopes(site: Site) -> None:
    base = "/client/v4/accounts/acc1/ai"
    tasks = (await call(site.app, f"{base}/tasks/search")).json["result"]
    assert [task["name"] for task in tasks] == ["Text Generation", "Text Embeddings", "Text Classification"]
    schemas = (await call(site.app, f"{base}/models/schema?model=@test/tiny")).json["result"]
    body = schemas["input"]["$defs"]["RunBody"]["properties"]
    assert {"prompt", "messages", "max_tokens", "stream", "tools", "response_format"} <= body.keys()
    assert "finish_reason" in schemas["output"]["$defs"]["TextResult"]["properties"]
    missing = await call(site.app, f"{base}/models/schema?model=nope")
    assert (missing.status, missing.json["errors"][0]["code"]) == (400, 5007)
    assert (await call(site.app, f"{base}/finetunes")).json["result"] == []
    verified = await call(site.app, "/client/v4/user/tokens/verify", authorization="Bearer abc")
    assert (verified.json["success"], verified.json["result"]["status"]) == (True, "active")
    assert (await call(site.app, "/client/v4/user/tokens/verify")).status == 401


async def test_the_responses_apis_inputs_give_a_response_in_an_envelope(site: Site) -> None:
    asked = {"instructions": "Be brief.", "input": "Hi", "text": {"format": {"type": "text"}}}
    result = (await call(site.app, RUN, asked)).json["result"]
    assert (result["object"], result["status"], result["output_text"]) == ("response", "completed", "Hello, world")
    assert result["output"][0]["content"][0]["text"] == "Hello, world"
    streamed = await call(site.app, RUN, {**asked, "stream": True})
    assert [event["type"] for event in streamed.events][-1] == "response.completed"
    refused = await call(site.app, RUN, {"input": [{"type": "song"}]})
    assert (refused.status, refused.json["errors"][0]["code"]) == (400, 5004)
