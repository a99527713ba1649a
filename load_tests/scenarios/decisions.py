"""The cost of decisions: python -m load_tests.scenarios.decisions MODEL.

MODEL is a checkpoint's folder or GGUF file with a chat template. One request has 64 questions of four options after a state of 2,000 tokens; it is
compared with the prefill of the same state and questions in one prompt, and with 64 chats with a JSON schema, one per question. The three take turns,
so that changes of the machine affect all; each round has a new state, which is not cached.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from load_tests.records import spread, write_record
from load_tests.site_process import SiteProcess

QUESTIONS, STATE_TOKENS, ROUNDS = 64, 2000, 3
CHOICES = ("billing", "technical", "sales", "other")
TOPICS = ("refunds", "invoices", "log-in", "shipping", "outages", "contracts", "discounts", "deliveries")
WORDS = (
    "The customer writes that the order",
    "has not come yet, and",
    "asks who may help;",
    "no one has answered the call,",
    "so the case is open.",
)
MODEL = "measured"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    taken: dict[str, list[float]] = {"decisions": [], "end to end": [], "chats": [], "state cached": []}
    with SiteProcess(
        "ams1", {"standby": False, "kv_gib": 1.0}, [{"name": MODEL, "source": str(options.model.resolve())}]
    ) as site:
        site.ask(chat("Hi", 1), path="/v1/chat/completions")
        for number in range(options.rounds):
            for name, seconds in measured(site, number).items():
                taken[name].append(seconds)
    results = {name: spread(values) for name, values in taken.items()}
    ratios = [a / b for a, b in zip(taken["decisions"], taken["end to end"], strict=True)]
    faster = [b / a for a, b in zip(taken["decisions"], taken["chats"], strict=True)]
    results |= {"of end to end": spread(ratios), "times faster than chats": spread(faster)}
    console = Console()
    for name, value in results.items():
        console.print(f"{name}: {value}", highlight=False)
    console.print(f"Record: {write_record('decisions', {'model': options.model.name, **results})}", soft_wrap=True)
    sys.exit(0)


def measured(site: SiteProcess, number: int) -> dict[str, float]:
    """Return the seconds that each way of asking the questions takes."""
    asked = [question(i) for i in range(QUESTIONS)]
    took: dict[str, float] = {}
    text = state(3 * number)
    took["decisions"] = timed(
        lambda: site.ask({"model": MODEL, "input": text, "questions": asked}, path="/v1/decisions")
    )
    took["state cached"] = timed(
        lambda: site.ask({"model": MODEL, "input": text, "questions": asked}, path="/v1/decisions")
    )
    laid = "\n\n".join([state(3 * number + 1), *(json.dumps(each) for each in asked)])
    took["end to end"] = timed(lambda: site.ask({"model": MODEL, "prompt": laid, "max_tokens": 1}))
    told = state(3 * number + 2)
    schema = {
        "type": "object",
        "properties": {"answer": {"enum": list(CHOICES)}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    bodies = [{**chat(f"{told}\n\n{each['instructions']}", 24), "response_format": form} for each in asked]

    def chats() -> None:
        with ThreadPoolExecutor(QUESTIONS) as pool:
            list(pool.map(lambda body: site.ask(body, path="/v1/chat/completions"), bodies))

    took["chats"] = timed(chats)
    return took


def timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def chat(said: str, most: int) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": said}], "max_tokens": most, "temperature": 0}


def question(number: int) -> dict[str, Any]:
    choices = [{"value": value} for value in CHOICES]
    instructions = f"Which team takes a case about {TOPICS[number % len(TOPICS)]} of kind {number}?"
    return {"type": "choice", "name": f"q{number}", "instructions": instructions, "choices": choices}


def state(number: int) -> str:
    """Return a text of some 2,000 tokens whose beginning is unique to `number`."""
    sentences = [
        f"Case {number}-{i}: {' '.join(WORDS[(i + j) % len(WORDS)] for j in range(len(WORDS)))}"
        for i in range(STATE_TOKENS // 38)
    ]
    return "\n".join(sentences)


if __name__ == "__main__":
    main()
