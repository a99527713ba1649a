"""Measures Ember's accuracy on phrasings, names and values that training never shows.

    python -m training.ember.evaluate
    python -m training.ember.evaluate --show-failures 5

An answer is right if it has the right value and no wrong one of the same kind. JSON objects and tool calls (name and arguments) are parsed and
compared. Answers come from a function from token ids to token ids; this module does not know the model.
"""

import argparse
import asyncio
import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_tests.in_process_client import InProcessEngineClient
from pilotlight.engine.api.protocol import Dtype, HostConfig, KvDtype, ModelSpec, SamplingParams, Submit
from training.ember.chat import HERE, Chat
from training.ember.cities import CITIES
from training.ember.corpus.conversation import Conversation, Split
from training.ember.corpus.extraction import unseen_keys
from training.ember.corpus.mixture import conversation
from training.ember.corpus.tools import unseen_tools

Generate = Callable[[list[list[int]], int], list[list[int]]]  # (prompts, maximum tokens of an answer) -> answers

# Required accuracy by task; the other tasks are only shown.
TARGETS = {"facts": 0.95, "recall": 0.95, "tools": 0.95, "json": 0.95, "arithmetic": 0.90}
# Tasks with names of tools or keys that training never shows, besides held-out phrasings and values.
UNSEEN = {"unseen tools": unseen_tools, "unseen keys": unseen_keys}
TASKS = (*TARGETS, "talk", "story", "repeat", "long", *UNSEEN)
SEED = 20_000
KV_BYTES = 512 << 20  # of the engine's KV cache: 64 sequences of 2,700 tokens fit
_COMPASS = re.compile(r"\d+°[NS], \d+°[EW]")
_CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)
_COUNTRIES = frozenset(city.country for city in CITIES)


@dataclass(frozen=True)
class Failure:
    question: str
    answer: str
    wanted: str


@dataclass(frozen=True)
class Score:
    task: str
    right: int
    asked: int
    failures: tuple[Failure, ...]

    @property
    def share(self) -> float:
        return self.right / self.asked

    @property
    def reached(self) -> bool:
        return self.share >= TARGETS.get(self.task, 0.0)


def questions(task: str, count: int, seed: int = SEED) -> list[Conversation]:
    """Return questions with held-out phrasings and values; the same seed gives the same questions."""
    draws = [random.Random(f"{task} {seed + index}") for index in range(count)]
    if task in UNSEEN:
        return [UNSEEN[task](rng) for rng in draws]
    return [conversation(rng, task, Split.HELD_OUT) for rng in draws]


def evaluate(generate: Generate, chat: Chat, task: str, count: int) -> Score:
    asked = questions(task, count)
    prompts = [chat.prompt(one.messages[:-1], one.tools) for one in asked]
    fitting = [index for index, prompt in enumerate(prompts) if len(prompt) <= 3900]
    answers = generate([prompts[index] for index in fitting], 160)
    failures = []
    for index, ids in zip(fitting, answers, strict=True):
        answer = chat.decode(ids)
        if not is_right(asked[index], answer):
            failures.append(_failure(asked[index], answer))
    return Score(task, len(fitting) - len(failures), len(fitting), tuple(failures))


def is_right(asked: Conversation, answer: str) -> bool:
    expected = asked.expected
    if expected.json is not None:
        return bool(_parsed(answer) == expected.json)
    if expected.call is not None:
        call = _CALL.fullmatch(answer)
        return call is not None and bool(_parsed(call.group(1)) == expected.call)
    if expected.no_call and "<tool_call>" in answer:
        return False
    if not all(_says(answer, word) for word in expected.holds) or any(_says(answer, word) for word in expected.lacks):
        return False
    return asked.task != "facts" or not _wrong_facts(answer, expected.holds)


def _wrong_facts(answer: str, holds: Sequence[str]) -> bool:
    """Return True if an answer about one city has the position, airport code or country of another city."""
    named = [one for one in CITIES if _says(answer, one.name)]
    city = max(named, key=lambda one: len(one.name), default=None)  # San Salvador, not Salvador in it
    own = {city.compass, city.code, city.country} if city else set()
    said = set(_COMPASS.findall(answer)) | set(re.findall(r"\b[A-Z]{3}\b", answer))
    said |= {country for country in _COUNTRIES if _says(answer, country)}
    if city is not None:
        said.discard(city.name)  # Singapore and Luxembourg are also names of countries
    return bool(said - own - set(holds))


def _says(answer: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", answer) is not None


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _failure(asked: Conversation, answer: str) -> Failure:
    question = str(asked.messages[-2]["content"])
    return Failure(question, answer, _wanted(asked.messages[-1]))


def _wanted(message: Mapping[str, Any]) -> str:
    calls = message.get("tool_calls")
    return json.dumps(calls[0]["function"], ensure_ascii=False) if calls else str(message["content"])


def show(scores: Sequence[Score], failures: int) -> None:
    print(f"{'task':<14}{'right':>8}{'asked':>8}{'share':>9}{'target':>9}")
    for score in scores:
        target = TARGETS.get(score.task)
        wanted = f"{target:.0%}" if target else "-"
        missed = "" if score.reached else "  missed"
        print(f"{score.task:<14}{score.right:>8}{score.asked:>8}{score.share:>9.1%}{wanted:>9}{missed}")
    for score in scores:
        for failure in score.failures[:failures]:
            print(f"\n{score.task}: {failure.question}\n  answered {failure.answer!r}\n  wanted   {failure.wanted!r}")


def engine_generator(folder: Path, chat: Chat, dtype: Dtype = "auto", kv_dtype: KvDtype = "auto") -> Generate:
    """Return a function that answers with the engine, all prompts of a task at once."""

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        answers = asyncio.run(_answers(ModelSpec("ember", str(folder), dtype, kv_dtype=kv_dtype), prompts, max_tokens))
        return [answer[:-1] if answer[-1:] == [chat.end] else answer for answer in answers]

    return generate


async def _answers(spec: ModelSpec, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    config = HostConfig(kv_bytes=KV_BYTES, max_num_batched_tokens=512, max_waiting=len(prompts))
    client = InProcessEngineClient(config)
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0)

    async def answer(index: int) -> list[int]:
        submit = Submit(str(index), "ember", tuple(prompts[index]), greedy)
        async with client.generate(submit) as outputs:
            return [token_id async for output in outputs for token_id in output.token_ids]

    try:
        await client.load_model(spec)
        return await asyncio.gather(*(answer(index) for index in range(len(prompts))))
    finally:
        await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate Ember on held-out phrasings, names and values.")
    parser.add_argument("--model", type=Path, default=HERE, help="folder with config.json and model.safetensors")
    parser.add_argument("--count", type=int, default=300, help="questions per task")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--show-failures", type=int, default=0, metavar="N", help="show N failures of each task")
    arguments = parser.parse_args()
    chat = Chat()
    generate = engine_generator(arguments.model, chat)
    scores = [
        evaluate(generate, chat, task, arguments.count if task != "long" else min(arguments.count, 60))
        for task in arguments.tasks
    ]
    show(scores, arguments.show_failures)
    sys.exit(0 if all(score.reached for score in scores) else 1)


if __name__ == "__main__":
    main()
