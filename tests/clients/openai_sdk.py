"""openai, the Python package."""

import harness
import openai
from harness import ANSWER, CHAT, ENDLESS, QUESTION, Person, expect

client = openai.OpenAI(base_url=harness.OPENAI_URL, api_key=harness.KEY, max_retries=0)
USER = {"role": "user", "content": QUESTION}
WEATHER_USER = {"role": "user", "content": harness.WEATHER_QUESTION}


def chat() -> None:
    answer = client.chat.completions.create(model=CHAT, messages=[USER])
    expect(ANSWER in answer.choices[0].message.content, answer)
    expect(answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage)


def stream() -> None:
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(model=CHAT, messages=[USER], stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    expect(ANSWER in text and len(chunks) > 3 and chunks[-1].usage, chunks)


def tools() -> None:
    """Check two turns: a streamed tool call that the model chooses to make, and its answer to the tool's result."""
    messages = [WEATHER_USER]
    with client.chat.completions.stream(model=CHAT, messages=messages, tools=[harness.TOOL]) as events:
        first = events.get_final_completion().choices[0]
    (call,) = first.message.tool_calls
    harness.expect_weather(call.function.arguments)
    expect(first.finish_reason == "tool_calls", first)
    messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": harness.WEATHER_RESULT}]
    final = client.chat.completions.create(model=CHAT, messages=messages, tools=[harness.TOOL])
    expect("18" in final.choices[0].message.content, final)


def forced_tool() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = client.chat.completions.create(model=CHAT, messages=[USER], tools=[harness.TOOL], tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls
        harness.expect_weather(call.function.arguments)


def strict_tool() -> None:
    tool = openai.pydantic_function_tool(Person)  # the client makes strict tools
    answer = client.chat.completions.parse(model=CHAT, messages=[USER], tools=[tool], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    expect(isinstance(call.function.parsed_arguments, Person), call)


def structured() -> None:
    messages = [{"role": "user", "content": harness.PERSON_QUESTION}]
    answer = client.chat.completions.parse(model=CHAT, messages=messages, response_format=Person)
    expect(isinstance(answer.choices[0].message.parsed, Person), answer)
    free = client.chat.completions.create(
        model=CHAT, messages=messages, response_format={"type": "json_object"}, max_tokens=200
    )
    expect(free.choices[0].message.content.startswith("{"), free)


def embeddings() -> None:
    answer = client.embeddings.create(model=harness.VECTORS, input=["one", "two"])
    expect([len(item.embedding) for item in answer.data] == [harness.VECTOR_SIZE] * 2, answer.usage)


def errors() -> None:
    def ask(**options: object) -> object:
        return client.chat.completions.create(**{"model": CHAT, "messages": [USER], **options})

    harness.expect_raised(openai.NotFoundError, lambda: ask(model="nope"), "nope")
    harness.expect_raised(openai.BadRequestError, lambda: ask(temperature=9), "temperature")
    long = [{"role": "user", "content": harness.TOO_LONG}]
    error = harness.expect_raised(
        openai.BadRequestError, lambda: ask(messages=long), "maximum context length is 4096 tokens"
    )
    expect(error.code == "context_length_exceeded", error)


def cancel() -> None:
    harness.expect_stops(client.chat.completions.create(model=ENDLESS, messages=[USER], stream=True), 3)


if __name__ == "__main__":
    harness.main("openai", {
        "chat": chat, "stream": stream, "tools": tools, "forced tool": forced_tool, "strict tool": strict_tool,
        "structured": structured, "embeddings": embeddings, "errors": errors, "cancel": cancel,
    })  # fmt: skip
