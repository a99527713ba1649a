"""ollama, the Python package."""

import json

import harness
import ollama
from harness import ANSWER, CHAT, ENDLESS, QUESTION, Person, expect

client = ollama.Client(host=harness.ROUTER)
USER = {"role": "user", "content": QUESTION}
NO_CHOICE = "its API has no tool_choice"


def chat() -> None:
    expect(CHAT in [model.model for model in client.list().models], client.list())
    expect("completion" in client.show(CHAT).capabilities, client.show(CHAT))
    for name in (CHAT, f"{CHAT}:latest"):
        answer = client.chat(name, [USER])
        expect(ANSWER in answer.message.content and answer.done_reason == "stop", answer)
        expect(answer.prompt_eval_count and answer.eval_count and answer.eval_duration, answer)
    expect(ANSWER in client.generate(CHAT, QUESTION).response, "generate")


def stream() -> None:
    pieces = list(client.chat(CHAT, [USER], stream=True))
    expect(ANSWER in "".join(piece.message.content for piece in pieces) and len(pieces) > 3, pieces)
    expect([piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True], pieces)
    expect(ANSWER in "".join(piece.response for piece in client.generate(CHAT, QUESTION, stream=True)), "generate")


def tools() -> None:
    messages = [{"role": "user", "content": harness.WEATHER_QUESTION}]
    first = client.chat(CHAT, messages, tools=[harness.TOOL])
    (call,) = first.message.tool_calls
    harness.expect_weather(call.function.arguments)
    messages += [first.message, {"role": "tool", "tool_name": "get_weather", "content": harness.WEATHER_RESULT}]
    final = client.chat(CHAT, messages, tools=[harness.TOOL])
    expect("18" in final.message.content, final)


def structured() -> None:
    messages = [{"role": "user", "content": harness.PERSON_QUESTION}]
    answer = client.chat(CHAT, messages, format=Person.model_json_schema())
    Person.model_validate_json(answer.message.content)
    free = client.chat(CHAT, [{"role": "system", "content": harness.JSON_SYSTEM}, *messages], format="json")
    expect(isinstance(json.loads(free.message.content), dict), free)


def embeddings() -> None:
    found = client.embed(harness.VECTORS, ["one", "two"])
    expect([len(vector) for vector in found.embeddings] == [harness.VECTOR_SIZE] * 2, found)
    expect(len(client.embeddings(harness.VECTORS, "one").embedding) == harness.VECTOR_SIZE, "embeddings")


def errors() -> None:
    error = harness.expect_raised(ollama.ResponseError, lambda: client.chat("nope", [USER]), "nope")
    expect(error.status_code == 404, error)
    bad = {"temperature": 9}
    harness.expect_raised(ollama.ResponseError, lambda: client.chat(CHAT, [USER], options=bad), "temperature")
    long = [{"role": "user", "content": harness.TOO_LONG}]
    harness.expect_raised(ollama.ResponseError, lambda: client.chat(CHAT, long), "4096")
    harness.expect_raised(ollama.ResponseError, lambda: client.delete(CHAT), "site's file")
    expect(client.pull(CHAT).status == "success", "pull")


def cancel() -> None:
    harness.expect_stops(client.chat(ENDLESS, [USER], stream=True), 3)


if __name__ == "__main__":
    harness.main("ollama", {
        "chat": chat, "stream": stream, "tools": tools, "forced tool": NO_CHOICE, "strict tool": NO_CHOICE, "structured": structured,
        "embeddings": embeddings, "errors": errors, "cancel": cancel,
    })  # fmt: skip
