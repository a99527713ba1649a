"""openai-agents over the chat completions API: agents, tools, outputs."""

import asyncio
from typing import Any

import harness
import openai
from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from harness import ANSWER, CHAT, QUESTION, Person, expect

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=harness.OPENAI_URL, api_key=harness.KEY, max_retries=0)
asked: list[str] = []


Model: Any = OpenAIChatCompletionsModel


def model(name: str = CHAT) -> Any:
    return Model(model=name, openai_client=client)


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    asked.append(city)
    return harness.WEATHER_RESULT


strict = function_tool(get_weather)  # strict by default
loose = function_tool(get_weather, strict_mode=False)


async def chat() -> None:
    answer = await Runner.run(Agent("a", model=model()), QUESTION)
    expect(ANSWER in answer.final_output, answer)


async def stream() -> None:
    answer = Runner.run_streamed(Agent("a", model=model()), QUESTION)
    events = [event.data async for event in answer.stream_events() if event.type == "raw_response_event"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    expect(ANSWER in "".join(deltas), deltas)


async def tools() -> None:
    asked.clear()
    answer = await Runner.run(Agent("a", model=model(), tools=[strict]), harness.WEATHER_QUESTION)
    expect(asked and "18" in answer.final_output, (asked, answer))


async def forced(tool: object) -> None:
    for choice in ("required", "get_weather"):
        asked.clear()
        agent = Agent(
            "a",
            model=model(),
            tools=[tool],
            model_settings=ModelSettings(tool_choice=choice),
            tool_use_behavior="stop_on_first_tool",
        )
        answer = await Runner.run(agent, harness.WEATHER_QUESTION)
        expect(asked and answer.final_output == harness.WEATHER_RESULT, (choice, asked, answer))


async def forced_tool() -> None:
    await forced(loose)


async def strict_tool() -> None:
    await forced(strict)


async def structured() -> None:
    for output in (Person, AgentOutputSchema(Person, strict_json_schema=False)):
        answer = await Runner.run(Agent("a", model=model(), output_type=output), harness.PERSON_QUESTION)
        expect(isinstance(answer.final_output, Person), (output, answer))


async def errors() -> None:
    try:
        await Runner.run(Agent("a", model=model("nope")), "x")
    except openai.NotFoundError as error:
        expect("nope" in str(error), error)
    else:
        raise AssertionError("nothing was raised")


async def cancel() -> None:
    answer = Runner.run_streamed(Agent("a", model=model(harness.ENDLESS)), QUESTION)
    seen = 0
    async for _ in answer.stream_events():
        seen += 1
        if seen == 6:
            harness.expect_running()
            answer.cancel()
    await asyncio.to_thread(harness.expect_idle)


def main() -> None:
    harness.main("openai-agents", {
        "chat": chat, "stream": stream, "tools": tools, "forced tool": forced_tool, "strict tool": strict_tool,
        "structured": structured, "embeddings": "has none", "errors": errors, "cancel": cancel,
    })  # fmt: skip


if __name__ == "__main__":
    main()
