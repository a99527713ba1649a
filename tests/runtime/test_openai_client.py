"""The official client against a real local server."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.fakes import says
from tests.runtime.conftest import Site

USER: Any = [{"role": "user", "content": "Hi"}]
CALL_TEXT = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
async def client(server: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as made:
        yield made


async def test_it_completes_and_counts_cached_tokens(client: openai.AsyncOpenAI, server: Site) -> None:
    server.engine.script = says("Hello", cached=5)
    answer = await client.chat.completions.create(model="tiny", messages=USER)
    assert answer.choices[0].message.content == "Hello"
    assert answer.usage.prompt_tokens_details.cached_tokens == 5


async def test_it_streams(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello, world"
    assert chunks[-1].usage.completion_tokens == 13


async def test_its_stream_helper_assembles_tool_calls(client: openai.AsyncOpenAI, server: Site) -> None:
    server.engine.script = says(CALL_TEXT)
    async with client.chat.completions.stream(model="tiny", messages=USER, tools=[TOOL]) as stream:
        final = await stream.get_final_completion()
    (made,) = final.choices[0].message.tool_calls or []
    assert (made.function.name, made.function.arguments) == ("get_weather", '{"city": "Paris"}')
    assert final.choices[0].finish_reason == "tool_calls"
    server.engine.script = says("It is sunny.")
    messages = [*USER, final.choices[0].message, {"role": "tool", "tool_call_id": made.id, "content": "sunny"}]
    answer = await client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])
    assert answer.choices[0].message.content == "It is sunny."


async def test_it_lists_models_and_completes_texts(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    answer = await client.completions.create(model="tiny", prompt="Once", logprobs=1)
    assert answer.choices[0].text == "Hello, world"


async def test_it_raises_typed_errors(client: openai.AsyncOpenAI, server: Site) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="nope", messages=USER)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=USER, max_tokens=-2)
    assert bad.value.param == "max_tokens"
    server.admission.max_inflight = 0
    with pytest.raises(openai.InternalServerError) as full:
        await client.chat.completions.create(model="tiny", messages=USER)
    assert (full.value.status_code, full.value.code) == (503, "overloaded")


async def test_an_error_in_mid_stream_is_raised_too(client: openai.AsyncOpenAI, server: Site) -> None:
    server.engine.script = [*says("Hel", finish=None), 0.02, RuntimeError("surprise")]
    stream = await client.chat.completions.create(model="tiny", messages=USER, stream=True)
    with pytest.raises(openai.APIError) as failure:
        async for _ in stream:
            pass
    assert failure.value.code == "internal_error"
