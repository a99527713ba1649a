"""litellm: its providers for vLLM, for OpenAI-compatible servers (both APIs), for Anthropic and for Cloudflare."""

import json
from functools import partial
from typing import Any

import harness
import litellm
from harness import ANSWER, CHAT, QUESTION, Person, expect

OPENAI = {"api_base": harness.OPENAI_URL, "api_key": harness.KEY}
CLOUDFLARE = {"api_base": f"{harness.CLOUDFLARE_URL}/accounts/account/ai/run", "api_key": harness.KEY}
ANTHROPIC = {"api_base": harness.ROUTER, "api_key": harness.KEY}
WITH_TOOLS = {"hosted_vllm/": OPENAI, "openai/": OPENAI, "openai/responses/": OPENAI, "anthropic/": ANTHROPIC}
WAYS = {**WITH_TOOLS, "cloudflare/@pilotlight/": CLOUDFLARE}
USER = {"role": "user", "content": QUESTION}
WEATHER_USER = {"role": "user", "content": harness.WEATHER_QUESTION}
litellm.num_retries = 0


def ask(way: str, model: str = CHAT, messages: Any = (USER,), **options: Any) -> Any:
    return litellm.completion(model=way + model, messages=[*messages], **WAYS[way], **options)


def chat() -> None:
    for way in WAYS:
        expect(ANSWER in ask(way).choices[0].message.content, way)


def stream() -> None:
    for way in WAYS:
        chunks = list(ask(way, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        expect(ANSWER in text and chunks[-1].usage, (way, chunks))


def tools() -> None:
    for way in WITH_TOOLS:
        first = ask(way, messages=[WEATHER_USER], tools=[harness.STRICT_TOOL]).choices[0].message
        (call,) = first.tool_calls
        harness.expect_weather(call.function.arguments)
        told = {"role": "tool", "tool_call_id": call.id, "content": harness.WEATHER_RESULT}
        final = ask(way, messages=[WEATHER_USER, first, told], tools=[harness.STRICT_TOOL])
        expect("18" in final.choices[0].message.content, (way, final))


def forced_tool() -> None:
    for way in WITH_TOOLS:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            (call,) = ask(way, tools=[harness.TOOL], tool_choice=choice).choices[0].message.tool_calls
            harness.expect_weather(call.function.arguments)


def strict_tool() -> None:
    for way in WITH_TOOLS:
        (call,) = ask(way, tools=[harness.STRICT_TOOL], tool_choice="required").choices[0].message.tool_calls
        harness.expect_weather(call.function.arguments)


def structured() -> None:
    for way in WITH_TOOLS:
        answer = ask(way, messages=[{"role": "user", "content": harness.PERSON_QUESTION}], response_format=Person)
        Person.model_validate_json(answer.choices[0].message.content)
        free = ask(
            way,
            messages=[{"role": "system", "content": harness.JSON_SYSTEM}, USER],
            response_format={"type": "json_object"},
        )
        expect(isinstance(json.loads(free.choices[0].message.content), dict), free)


def embeddings() -> None:
    for way in ("hosted_vllm/", "openai/"):
        made = litellm.embedding(model=way + harness.VECTORS, input=["one", "two"], encoding_format="float", **OPENAI)
        expect([len(item["embedding"]) for item in made.data] == [harness.VECTOR_SIZE] * 2, way)


def errors() -> None:
    for way in WITH_TOOLS:
        harness.expect_raised(litellm.NotFoundError, partial(ask, way, model="nope"))
        long = [{"role": "user", "content": harness.TOO_LONG}]
        harness.expect_raised(litellm.ContextWindowExceededError, partial(ask, way, messages=long))


async def cancel() -> None:
    async def ask_forever() -> None:
        answer = await litellm.acompletion(
            model=f"hosted_vllm/{harness.ENDLESS}", messages=[USER], stream=True, **OPENAI
        )
        async for _ in answer:
            pass

    await harness.expect_cancelled(ask_forever())


if __name__ == "__main__":
    harness.main("litellm", {
        "chat": chat, "stream": stream, "tools": tools, "forced tool": forced_tool, "strict tool": strict_tool,
        "structured": structured, "embeddings": embeddings, "errors": errors, "cancel": cancel,
    })  # fmt: skip
