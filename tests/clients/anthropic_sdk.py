"""anthropic, the Python package."""

import anthropic
import harness
from harness import ANSWER, CHAT, ENDLESS, QUESTION, Person, expect

client = anthropic.Anthropic(base_url=harness.ROUTER, api_key=harness.KEY, max_retries=0)
TOOL = {"name": "get_weather", "description": "Get the weather of a city", "input_schema": harness.WEATHER}
USER = {"role": "user", "content": QUESTION}
WEATHER_USER = {"role": "user", "content": harness.WEATHER_QUESTION}


def ask(**options: object) -> anthropic.types.Message:
    return client.messages.create(**{"model": CHAT, "max_tokens": 300, "messages": [USER], **options})


def chat() -> None:
    answer = ask(system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    expect(ANSWER in answer.content[0].text and answer.stop_reason == "end_turn", answer)
    counted = client.messages.count_tokens(model=CHAT, messages=[USER], system="Be brief.")
    usage = answer.usage
    expect(counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens, (counted, usage))
    stopped = ask(stop_sequences=[ANSWER])
    expect((stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", ANSWER), stopped)
    models = [model.id for model in client.models.list()]
    expect(CHAT in models and client.models.retrieve(CHAT).id == CHAT, models)


def stream() -> None:
    with client.messages.stream(model=CHAT, max_tokens=300, messages=[USER]) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    expect(ANSWER in text and final.content[0].text == text and final.usage.output_tokens > 3, final)
    kinds = [event.type for event in ask(stream=True)]
    expect((kinds[0], kinds[-1]) == ("message_start", "message_stop") and len(kinds) > 6, kinds)


def tools() -> None:
    """Check two turns: a streamed tool call that the model chooses to make, and its answer to the tool's result."""
    messages = [WEATHER_USER]
    with client.messages.stream(model=CHAT, max_tokens=300, messages=messages, tools=[TOOL]) as events:
        first = events.get_final_message()
    (call,) = [block for block in first.content if block.type == "tool_use"]
    harness.expect_weather(call.input)
    expect(first.stop_reason == "tool_use", first)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": harness.WEATHER_RESULT}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    final = ask(messages=messages, tools=[TOOL])
    expect("18" in final.content[0].text, final)


def forced_tool() -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = ask(tools=[TOOL], tool_choice=choice)
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        harness.expect_weather(call.input)


def strict_tool() -> None:
    answer = ask(tools=[{**TOOL, "strict": True}], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    (call,) = answer.content
    harness.expect_weather(call.input)


def structured() -> None:
    messages = [{"role": "user", "content": harness.PERSON_QUESTION}]
    answer = client.messages.parse(model=CHAT, max_tokens=200, messages=messages, output_format=Person)
    expect(isinstance(answer.parsed_output, Person), answer)


def errors() -> None:
    error = harness.expect_raised(anthropic.NotFoundError, lambda: ask(model="nope"), "nope")
    expect(error.body["error"]["type"] == "not_found_error", error)
    harness.expect_raised(anthropic.BadRequestError, lambda: ask(extra_body={"temperature": 9}), "temperature")
    picture = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    harness.expect_raised(
        anthropic.BadRequestError, lambda: ask(messages=[{"role": "user", "content": [picture]}]), "image"
    )
    long = [{"role": "user", "content": harness.TOO_LONG}]
    harness.expect_raised(anthropic.BadRequestError, lambda: ask(messages=long), "prompt is too long")


def cancel() -> None:
    harness.expect_stops(ask(model=ENDLESS, max_tokens=100_000, stream=True), 4)


if __name__ == "__main__":
    harness.main("anthropic", {
        "chat": chat, "stream": stream, "tools": tools, "forced tool": forced_tool, "strict tool": strict_tool,
        "structured": structured, "embeddings": "has none", "errors": errors, "cancel": cancel,
    })  # fmt: skip
