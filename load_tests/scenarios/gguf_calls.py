"""The share of valid tool calls and JSON of a real model, with and without constraints.

By this engine and by llama.cpp's server:

    python -m load_tests.scenarios.gguf_calls FILE.gguf ... --peers .peers --prompts 200       (make peers)

Half of the prompts offer four tools, and each is sent with tool_choice "auto" and "required". The other half contain a JSON schema, and each is sent
without and with a response_format. A call is valid if it names an offered tool and its arguments follow that tool's schema; JSON is valid if it is
the whole answer and follows the schema. Both servers get the same bodies, four at a time, at temperature 0. With `--state FILE`, a run that was
interrupted continues.
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jsonschema
from rich.console import Console
from rich.table import Table

from load_tests.peers.llama_server import LlamaServer, find_program
from load_tests.records import write_record
from load_tests.scenarios.engines import OURS, ROOT
from load_tests.site_process import SiteProcess

PEER, MODEL = "llama.cpp", "measured"
PATH = "/v1/chat/completions"
MAX_TOKENS = 192
AT_ONCE = 4  # requests

Body = dict[str, Any]
Ask = Callable[[Body], tuple[int, Body]]


def _object(**properties: Any) -> Body:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_TEXT, _WHOLE, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TOOLS: dict[str, tuple[str, Body, tuple[str, ...]]] = {
    "get_weather": (
        "Return the weather of a city.",
        _object(city=_TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
        ("What is the weather in {} in celsius?", "Is it warm in {} now? Use fahrenheit."),
    ),
    "book_table": (
        "Book a table at a restaurant of a city.",
        _object(city=_TEXT, people=_WHOLE, time=_TEXT),
        ("Book a table for four in {} at 19:30.", "I want to eat in {} at noon, just me."),
    ),
    "convert_money": (
        "Convert an amount between two currencies.",
        _object(amount=_NUMBER, source=_TEXT, target=_TEXT),
        ("I am flying to {} from Canada: what are 120 dollars there?", "Convert 99.5 euros for my trip to {}."),
    ),
    "find_trains": (
        "List trains between two cities on a day.",
        _object(origin=_TEXT, destination=_TEXT, day=_TEXT, first_class={"type": "boolean"}),
        (
            "Which trains go from Vienna to {} on Friday, first class?",
            "Find second-class trains from {} to Rome today.",
        ),
    ),
}
CITIES = (
    "Paris", "Lagos", "Osaka", "Lima", "Oslo", "Cairo", "Boston", "Mumbai", "Sydney", "Berlin", "Quito", "Seoul", "Dakar",
)  # fmt: skip
SCHEMAS: tuple[tuple[str, Body], ...] = (
    ("the city {}", _object(name=_TEXT, country=_TEXT, population=_WHOLE)),
    ("a book about {}", _object(title=_TEXT, author=_TEXT, year=_WHOLE, tags={"type": "array", "items": _TEXT})),
    ("an order of something from {}", _object(item=_TEXT, count=_WHOLE, gift={"type": "boolean"}, price=_NUMBER)),
    ("a review of a hotel in {}", _object(stars={"enum": [1, 2, 3, 4, 5]}, text=_TEXT, language=_TEXT)),
    (
        "a route that begins in {}",
        _object(stops={"type": "array", "items": _object(name=_TEXT, km=_NUMBER), "minItems": 2, "maxItems": 4}),
    ),
    (
        "an invented person from {}",
        _object(name=_TEXT, age=_WHOLE, email=_TEXT, address=_object(street=_TEXT, city=_TEXT)),
    ),
    ("a mood of {} in one word", _object(mood={"enum": ["calm", "busy", "sad", "merry"]}, why=_TEXT)),
    ("a meeting in {}", _object(title=_TEXT, minutes=_WHOLE, people={"type": "array", "items": _TEXT, "minItems": 1})),
)


class Case(NamedTuple):
    way: str  # kind of prompt ("tools" or "JSON") and its constraint
    body: Body
    schemas: dict[str, Body]  # the schemas of tools by name; for JSON, the only schema


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="the folder that make peers has filled")
    parser.add_argument("--prompts", type=int, default=200, help="half of them with tools; each is sent twice")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peer-flags", default="", help="of llama-server")
    parser.add_argument("--state", type=Path, help="the file that keeps each answer's outcome")
    options = parser.parse_args()
    program = find_program(options.peers, "llama-server")
    if program is None:
        print("llama.cpp is not set up; run: make peers", file=sys.stderr)
        return 3
    console, files = Console(width=150), dict[str, Body]()
    for file in options.files:
        found = {
            name: _outcomes(server, options.prompts, options.state, f"{file.name}, {name}")
            for name, server in ((OURS, _us(file, options)), (PEER, _peer(program, file, options)))
        }
        files[file.name] = found
        console.print(_table(file.name, found))
    results = {"prompts": options.prompts, "threads": options.threads, "files": files}
    console.print(f"Record: {write_record('gguf-calls', results)}", soft_wrap=True)
    return 0


@contextmanager
def _us(file: Path, options: argparse.Namespace) -> Iterator[Ask]:
    engine = {"threads": options.threads, "kv_gib": 0.5, "standby": False}
    with SiteProcess("ams1", engine, [{"name": MODEL, "source": str(file.resolve())}]) as site:
        yield partial(site.post, PATH)


@contextmanager
def _peer(program: Path, file: Path, options: argparse.Namespace) -> Iterator[Ask]:
    with TemporaryDirectory() as folder:
        flags = ["--jinja", "-c", str(4096 * AT_ONCE), "-np", str(AT_ONCE), *options.peer_flags.split()]
        with LlamaServer(program, file, options.threads, Path(folder) / "log", flags) as server:
            yield partial(server.post, PATH)


def _outcomes(server: AbstractContextManager[Ask], prompts: int, state: Path | None, name: str) -> Body:
    """Count for each constraint the valid answers, and the others by their errors.

    `state` keeps the outcomes of this and other servers; `name` is this one's there.
    """
    kept: dict[str, str] = json.loads(state.read_text()) if state is not None and state.exists() else {}
    asked = {f"{name} {i}": case for i, case in enumerate(cases(prompts))}
    if missing := {key: case for key, case in asked.items() if key not in kept}:
        with server as ask, ThreadPoolExecutor(AT_ONCE) as threads:
            answers = threads.map(ask, [case.body for case in missing.values()])
            for (key, case), (status, answer) in zip(missing.items(), answers, strict=True):
                kept[key] = judged(case, answer) if status == 200 else f"{status}: {_message(answer)}"
                if state is not None:
                    state.write_text(json.dumps(kept))
    found: dict[str, Counter[str]] = {}
    for key, case in asked.items():
        found.setdefault(case.way, Counter())[kept[key]] += 1
    return {way: dict(counts.most_common()) for way, counts in found.items()}


def _message(answer: Body) -> str:
    error = answer.get("error", answer)
    return str(error.get("message", error) if isinstance(error, dict) else error)[:160]


def cases(prompts: int) -> Iterator[Case]:
    """Yield two cases per prompt: with a weaker and a stronger constraint."""
    offered = [
        {"type": "function", "function": {"name": name, "description": what, "parameters": schema}}
        for name, (what, schema, _) in TOOLS.items()
    ]
    asked = [text.format(city) for city in CITIES for _, _, texts in TOOLS.values() for text in texts]
    schemas = {name: schema for name, (_, schema, _) in TOOLS.items()}
    for text in asked[: prompts // 2]:
        for choice in ("auto", "required"):
            yield Case(f"tools, {choice}", {**_chat(text), "tools": offered, "tool_choice": choice}, schemas)
    described = [(what.format(city), schema) for city in CITIES for what, schema in SCHEMAS]
    for what, schema in described[: prompts - prompts // 2]:
        body = _chat(
            f"Describe {what} as JSON. Answer with the JSON alone. It must follow this schema: {json.dumps(schema)}"
        )
        yield Case("JSON, asked in words", body, {"": schema})
        form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
        yield Case("JSON, response_format", {**body, "response_format": form}, {"": schema})


def _chat(text: str) -> Body:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
    }


def judged(case: Case, answer: Body) -> str:
    """Return "valid", or the reason why an answer is not."""
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return "too long"
    message = choice["message"]
    if "" in case.schemas:
        return _judged_json(message.get("content") or "", case.schemas[""])
    calls = message.get("tool_calls") or []
    if not calls:
        return "no call"
    wrong = {_judged_call(call["function"], case.schemas) for call in calls} - {"valid"}
    return min(wrong, default="valid")


def _judged_call(function: Body, schemas: dict[str, Body]) -> str:
    schema = schemas.get(function["name"])
    return "an unknown tool" if schema is None else _judged_json(function["arguments"], schema)


def _judged_json(text: str, schema: Body) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return "not JSON"
    return "valid" if jsonschema.Draft202012Validator(schema).is_valid(value) else "not by its schema"


def _table(title: str, found: dict[str, Body]) -> Table:
    table = Table(title, *found)
    for way in next(iter(found.values())):
        table.add_row(way, *(_shown(outcomes[way]) for outcomes in found.values()))
    return table


def _shown(counts: dict[str, int]) -> str:
    others = ", ".join(f"{count} {name}" for name, count in counts.items() if name != "valid")
    return f"{counts.get('valid', 0)} of {sum(counts.values())} valid" + (f" ({others})" if others else "")


if __name__ == "__main__":
    sys.exit(main())
