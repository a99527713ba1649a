"""openai, the Python package, over the Responses API, including stored and background responses."""

import time

import harness
import openai
from harness import ANSWER, CHAT, ENDLESS, QUESTION, Person, expect

client = openai.OpenAI(base_url=harness.OPENAI_URL, api_key=harness.KEY, max_retries=0)
TOOL = {"type": "function", **harness.TOOL["function"], "strict": False}


def ask(**options: object) -> openai.types.responses.Response:
    return client.responses.create(**{"model": CHAT, "input": QUESTION, **options})


def chat() -> None:
    answer = ask(instructions="Be brief.")
    expect(ANSWER in answer.output_text and answer.status == "completed", answer)
    expect(answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens, answer.usage)
    again = ask(input="And of Oslo?", previous_response_id=answer.id)
    expect(again.usage.input_tokens > answer.usage.total_tokens - 20 and again.previous_response_id == answer.id, again)
    expect(client.responses.retrieve(answer.id).output_text == answer.output_text, answer.id)
    items = client.responses.input_items.list(again.id, order="asc").data
    expect([item.type for item in items] == ["message"] * 3 and items[2].content[0].text == "And of Oslo?", items)
    counted = client.responses.input_tokens.count(model=CHAT, input="And of Oslo?", previous_response_id=answer.id)
    expect(counted.input_tokens == again.usage.input_tokens, (counted, again.usage))
    client.responses.delete(answer.id)
    harness.expect_raised(openai.NotFoundError, lambda: client.responses.retrieve(answer.id), answer.id)
    cut = ask(max_output_tokens=2)
    expect((cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens"), cut)


def stream() -> None:
    events = list(ask(stream=True))
    expect([event.sequence_number for event in events] == list(range(len(events))), events)
    expect((events[0].type, events[-1].type) == ("response.created", "response.completed"), events)
    with client.responses.stream(model=CHAT, input=QUESTION) as told:
        text = "".join(event.delta for event in told if event.type == "response.output_text.delta")
        final = told.get_final_response()
    expect(ANSWER in text and final.output_text == text, final)
    background()


def background() -> None:
    started = ask(background=True)
    while started.status in ("queued", "in_progress"):
        time.sleep(0.05)
        started = client.responses.retrieve(started.id)
    expect(ANSWER in started.output_text and started.background, started)
    events = list(ask(background=True, stream=True))
    rest = list(client.responses.retrieve(events[0].response.id, stream=True, starting_after=events[2].sequence_number))
    expect([event.sequence_number for event in rest] == list(range(3, len(events))), rest)
    endless = ask(model=ENDLESS, background=True)
    harness.expect_running()
    expect(client.responses.cancel(endless.id).status == "cancelled", endless)
    harness.expect_idle()


def tools() -> None:
    """Check two turns: a streamed tool call that the model chooses to make, and its answer to the tool's result."""
    said = [{"role": "user", "content": harness.WEATHER_QUESTION}]
    with client.responses.stream(model=CHAT, input=said, tools=[TOOL]) as events:
        first = events.get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    harness.expect_weather(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": harness.WEATHER_RESULT}
    for final in (
        ask(input=[*said, *first.output, result], tools=[TOOL]),
        ask(input=[result], previous_response_id=first.id, tools=[TOOL]),
    ):
        expect("18" in final.output_text, final)


def forced_tool() -> None:
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        answer = ask(tools=[TOOL], tool_choice=choice)
        (call,) = [item for item in answer.output if item.type == "function_call"]
        harness.expect_weather(call.arguments)


def strict_tool() -> None:
    tool = openai.pydantic_function_tool(Person)["function"]
    answer = client.responses.parse(
        model=CHAT, input=QUESTION, tools=[{"type": "function", **tool}], tool_choice="required"
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    expect(isinstance(Person.model_validate_json(call.arguments), Person), call)


def structured() -> None:
    answer = client.responses.parse(model=CHAT, input=harness.PERSON_QUESTION, text_format=Person)
    expect(isinstance(answer.output_parsed, Person), answer)


def errors() -> None:
    error = harness.expect_raised(openai.NotFoundError, lambda: ask(model="nope"), "nope")
    expect(error.code == "model_not_found", error)
    harness.expect_raised(openai.BadRequestError, lambda: ask(temperature=9), "temperature")
    harness.expect_raised(openai.NotFoundError, lambda: ask(previous_response_id="resp_x"), "resp_x")
    harness.expect_raised(openai.BadRequestError, lambda: ask(background=True, temperature=9), "temperature")
    error = harness.expect_raised(openai.BadRequestError, lambda: ask(input=harness.TOO_LONG), "4096 tokens")
    expect(error.code == "context_length_exceeded", error)


def cancel() -> None:
    harness.expect_stops(ask(model=ENDLESS, stream=True), 6)


if __name__ == "__main__":
    harness.main("openai", {
        "chat": chat, "stream": stream, "tools": tools, "forced tool": forced_tool, "strict tool": strict_tool,
        "structured": structured, "embeddings": "another API of it", "errors": errors, "cancel": cancel,
    })  # fmt: skip
