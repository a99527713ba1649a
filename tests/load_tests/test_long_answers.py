"""The data set for speculative decoding of long answers: its answers are correct, and its adapter fits Ember."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from load_tests.long_answers.corpus import ASKS, calls, copying, editing, quoting, records
from load_tests.long_answers.train import ADAPTER, RANK, merged
from pilotlight.engine.adapters.peft import check
from training.ember.chat import HERE, Chat
from training.ember.corpus.conversation import Split
from training.ember.network import Network, load

SPLITS = pytest.mark.parametrize("split", Split)


def follows(schema: dict[str, Any], value: Any) -> bool:
    match schema["type"]:
        case "object":
            properties = schema["properties"]
            return list(value) == schema["required"] and all(follows(properties[key], value[key]) for key in value)
        case "array":
            return all(follows(schema["items"], item) for item in value)
        case "integer":
            return isinstance(value, int)
        case _:
            return isinstance(value, str)


@SPLITS
def test_texts_are_copied_edited_and_quoted_word_by_word(split: Split) -> None:
    for seed in range(20):
        question, answer = (str(message["content"]) for message in copying(random.Random(seed), split).messages)
        assert question == f"Copy this text:\n{answer}"
        question, answer = (str(message["content"]) for message in editing(random.Random(seed), split).messages)
        asked, text = question.split("\n")
        old, new = asked.removeprefix("Replace ").removesuffix(":").split(" by ")
        assert old in text
        assert answer == text.replace(old, new)
        question, answer = (str(message["content"]) for message in quoting(random.Random(seed), split).messages)
        heading = question.rpartition("under ")[2].removesuffix(".")
        assert f"{heading}: {answer[1:-1]}\n" in question


@SPLITS
def test_records_and_calls_follow_their_schemas_and_contain_the_given_facts(split: Split) -> None:
    for seed in range(20):
        asked = records(random.Random(seed), split)
        system, told, answer = (str(message["content"]) for message in asked.messages)
        found = json.loads(answer)
        assert follows(json.loads(system[system.index("{") :]), found)
        assert all(str(value) in told for member in found["members"] for value in member.values())
        asked = calls(random.Random(seed), split)
        (tool,), (question, called) = asked.tools, asked.messages
        (call,) = called["tool_calls"]
        assert follows(tool["function"]["parameters"], call["function"]["arguments"])
        assert all(str(value) in question["content"] for value in call["function"]["arguments"].values())


@pytest.mark.long
def test_the_adapter_is_one_of_embers_and_lowers_what_long_answers_cost(tmp_path: Path) -> None:
    assert check(ADAPTER).rank == RANK
    chat, rng = Chat(), random.Random(3)
    asked = [ask(rng, Split.HELD_OUT) for ask in ASKS.values()]
    lessons = [chat.lesson(each.messages, each.tools) for each in asked]

    def loss(network: Network) -> float:
        with torch.inference_mode():
            total = 0.0
            for ids, learned in lessons:
                at = torch.tensor(learned[1:])
                logits = network.logits(network(torch.tensor([ids[:-1]]))[0, at])
                total += torch.nn.functional.cross_entropy(logits.float(), torch.tensor(ids[1:])[at]).item()
            return total / len(lessons)

    before, after = loss(load(HERE)), loss(load(merged(tmp_path)))
    assert after < 0.25 < before
