"""Shared parts of the programs that check Python clients: names of models, a question, a tool, and running and reporting checks.

A program runs in the environment of its client, not of the project: `python openai_chat.py FILE` writes its results to FILE. A check is a function,
or, if the client lacks the feature, a string with the reason.
"""

import asyncio
import importlib.metadata
import inspect
import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from pydantic import BaseModel, Field  # every client depends on pydantic

ROUTER = os.environ["PILOTLIGHT_ROUTER"]
SITE = os.environ["PILOTLIGHT_SITE"]  # its /status shows whether an answer is still being computed
OPENAI_URL = f"{ROUTER}/v1"
CLOUDFLARE_URL = f"{ROUTER}/client/v4"
KEY = "any-key"
CHAT, VECTORS, ENDLESS = "ember", "vectors", "endless"  # answers of "endless" never end
VECTOR_SIZE = int(os.environ["PILOTLIGHT_VECTOR_SIZE"])
CHAT_FILES = os.environ["PILOTLIGHT_CHAT_FILES"]  # Ember's directory, for clients that count tokens themselves

QUESTION, ANSWER = "What is the airport code of Lisbon?", "LIS"
WEATHER_QUESTION = "What is the weather in Paris?"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
# The string has a bound, as a small model might never end it.
BOUNDED_WEATHER = {**WEATHER, "properties": {"city": {"type": "string", "maxLength": 20}}}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather of a city", "parameters": WEATHER},
}
STRICT_TOOL = {"type": "function", "function": {**TOOL["function"], "strict": True}}
WEATHER_RESULT = json.dumps({"temperature": 18, "sky": "clear"})


def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return WEATHER_RESULT


class Person(BaseModel, extra="forbid"):
    """A person."""

    name: str = Field(max_length=20)  # a small model might never end an unbounded string
    age: int = Field(ge=0, le=150)


class Anything(BaseModel, extra="allow"):
    """Any JSON object."""


PERSON_QUESTION = "Nora is 31 years old. Who is she?"
# For clients that can request JSON but no schema: the prompt that Ember was trained with.
JSON_SYSTEM = f"Reply with one JSON object that matches this schema:\n{json.dumps(Person.model_json_schema())}"
TOO_LONG = "word " * 6000  # Ember's context has 4,096 tokens

CHECK_S = 120
CANCEL_S = 3.0  # within this time the engine must stop a cancelled answer

Check = Callable[[], Any]


def main(package: str, checks: Mapping[str, Check | str], check_s: int = CHECK_S) -> None:
    with asyncio.Runner() as runner:  # one loop for all checks: clients keep its connections
        found = {
            name: {"verdict": "none", "reason": check} if isinstance(check, str) else outcome(check, runner, check_s)
            for name, check in checks.items()
        }
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump({"package": package, "version": importlib.metadata.version(package), "checks": found}, file)


def outcome(check: Check, runner: asyncio.Runner, check_s: int) -> dict[str, str]:
    """Run a check for at most `check_s` seconds; return its verdict and the reason if it fails."""
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(check_s)
    try:
        runner.run(check()) if inspect.iscoroutinefunction(check) else check()
    except Exception as error:
        return {"verdict": "fails", "reason": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        signal.alarm(0)
    return {"verdict": "works", "reason": ""}


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError("no end within the time of a check")


def expect(condition: object, what: object) -> None:
    if not condition:
        raise AssertionError(f"not as expected: {what!r}")


def expect_raised(
    kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], *words: str
) -> Exception:
    """Return the exception that a call raises; fail if it is of another kind or its message lacks one of the words."""
    try:
        value = call()
    except kind as error:
        expect(all(word in str(error) for word in words), error)
        return error  # type: ignore[return-value]
    raise AssertionError(f"nothing was raised, but returned: {value!r}")


def expect_weather(arguments: str | Mapping[str, Any]) -> None:
    """Check the arguments of a call of the weather tool; any city is accepted."""
    values = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
    expect(values.keys() == {"city"} and isinstance(values["city"], str), values)


def expect_stops(answer: Any, num_parts: int) -> None:
    """Read `num_parts` parts of an endless stream; check that it is being computed, and that it stops when it is closed."""
    for _ in range(num_parts):
        next(answer)
    expect_running()
    answer.close()
    expect_idle()


async def expect_cancelled(answer: Coroutine[Any, Any, Any]) -> None:
    """Check that an endless answer is being computed, and that it stops when its task is cancelled."""
    task = asyncio.create_task(answer)
    await asyncio.to_thread(expect_running)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(expect_idle)


def running() -> int:
    with urllib.request.urlopen(f"{SITE}/status", timeout=10) as answer:
        models = json.load(answer)["models"]
    return sum(model["running"] + model["waiting"] for model in models)


def expect_running() -> None:
    until(lambda: running() > 0, 5.0, "the answer was never computed")


def expect_idle() -> None:
    """Check that no answer is computed any more within CANCEL_S seconds."""
    until(lambda: running() == 0, CANCEL_S, f"the answer is still computed {CANCEL_S:g} s after its client left")


def until(condition: Callable[[], bool], within_s: float, otherwise: str) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(otherwise)
        time.sleep(0.05)
