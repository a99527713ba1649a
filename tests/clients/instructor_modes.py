"""instructor with openai's client, in each of its modes for OpenAI's API."""

from typing import Any

import harness
import instructor
import openai
from harness import CHAT, Anything, Person, expect
from pydantic import BaseModel

raw = openai.OpenAI(base_url=harness.OPENAI_URL, api_key=harness.KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": harness.PERSON_QUESTION}]
JSON_MESSAGES = [{"role": "system", "content": harness.JSON_SYSTEM}, *MESSAGES]


class Words(BaseModel):
    words: list[str]  # the endless model never ends such a list


NOT_ITS = "all its requests ask for a structured object"


def ask(mode: instructor.Mode, kind: type[BaseModel] = Person, messages: list[Any] = MESSAGES) -> None:
    client = instructor.from_openai(raw, mode=mode)
    made = client.chat.completions.create(model=CHAT, messages=messages, response_model=kind, max_retries=0)
    expect(isinstance(made, kind), (mode, made))


def stream() -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode.JSON_SCHEMA)
    made = list(
        client.chat.completions.create_partial(model=CHAT, messages=MESSAGES, response_model=Person, max_retries=0)
    )
    expect(made[-1].age is not None, made)


def forced_tool() -> None:
    ask(instructor.Mode.TOOLS)  # instructor's default


def strict_tool() -> None:
    ask(instructor.Mode.TOOLS_STRICT)


def structured() -> None:
    ask(instructor.Mode.JSON_SCHEMA)
    ask(instructor.Mode.JSON, Anything, JSON_MESSAGES)


def errors() -> None:
    client = instructor.from_openai(raw, mode=instructor.Mode.TOOLS)
    harness.expect_raised(
        Exception,
        lambda: client.chat.completions.create(model="nope", messages=MESSAGES, response_model=Person, max_retries=0),
        "nope",
    )


async def cancel() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(base_url=harness.OPENAI_URL, api_key=harness.KEY, max_retries=0))
    options = {"model": harness.ENDLESS, "messages": MESSAGES, "response_model": Words, "max_retries": 0}
    await harness.expect_cancelled(client.chat.completions.create(**options))


if __name__ == "__main__":
    harness.main("instructor", {
        "chat": NOT_ITS, "stream": stream, "tools": NOT_ITS, "forced tool": forced_tool, "strict tool": strict_tool,
        "structured": structured, "embeddings": "has none", "errors": errors, "cancel": cancel,
    })  # fmt: skip
