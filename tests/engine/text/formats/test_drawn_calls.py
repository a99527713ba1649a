"""Random tool calls in every format, cut into tokens anywhere: the result does not depend on the cuts, and no markup appears as text. The tests draw
few; `python -m tests.engine.text.formats.test_drawn_calls 100000` draws 100,000 calls.
"""

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pilotlight.engine.text.formats import Thinking
from pilotlight.engine.text.formats.format_registry import FORMATS
from pilotlight.engine.text.formats.tools import function_tags, minimax_m3
from tests.engine.text.formats.reading import Read, chunked, format_of, parts_of, told

SAMPLE = 15  # number of draws for each format in the tests
NAMES = ("get_weather", "note", "f", "run-it_2")
WORDS = (
    "Paris",
    'a "b"',
    "it's",
    "line\nbreak",
    "{",
    "}]",
    "<",
    "</",
    "日本語",
    "🐈",
    "\\",
    "\t",
    "0",
    "true",
    "",
    " x ",
    "a=b",
    "'",
    "[1]",
)
SCHEMA = {
    "type": "object",
    "properties": {"s": {"type": "string"}, "t": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}},
}

Call = tuple[str, dict[str, Any]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tagged(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _kimi(calls: list[Call]) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{_json(arguments)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def _deepseek(form: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        each = (form % (name, _json(arguments)) for name, arguments in calls)
        return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"

    return write


def _function_tags(form: function_tags.TagForm) -> Callable[[list[Call]], str]:
    end, padding = f"{form.quote}>", form.padding

    def one(name: str, arguments: dict[str, Any]) -> str:
        parameters = "".join(
            f"{form.parameter}{key}{form.key_end(_json(isinstance(value, str)))}{padding}{_tagged(value)}{padding}{form.parameter_end}\n"
            for key, value in arguments.items()
        )
        return f"{form.function}{name}{end}\n{parameters}{form.function_end}"

    def write(calls: list[Call]) -> str:
        each = [one(*call) for call in calls]
        return "\n".join(
            f"{form.open}\n{body}\n{form.close}" for body in (["\n".join(each)] if form.is_section else each)
        )

    return write


def _glm(calls: list[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_tagged(value)}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def _python(calls: list[Call], comma: str = ", ") -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return comma.join(one(*call) for call in calls)


def _list(calls: list[Call]) -> str:
    return _json([{"name": name, "arguments": arguments} for name, arguments in calls])


def _llama(calls: list[Call]) -> str:
    each = (f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls)
    return f"<|python_tag|>{'; '.join(each)}"


def _gemma(calls: list[Call]) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        if isinstance(value, list):
            return f"[{','.join(map(written, value))}]"
        return _json(value)

    fields = [(name, ",".join(f"{key}:{written(value)}" for key, value in given.items())) for name, given in calls]
    return "".join(f"<|tool_call>call:{name}{{{given}}}<tool_call|>" for name, given in fields)


def _harmony(calls: list[Call]) -> str:
    ((name, arguments), *_) = calls  # harmony has one call per turn
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}<|call|>"


def _cohere(calls: list[Call]) -> str:
    listed = [
        {"tool_call_id": str(number), "tool_name": name, "parameters": arguments}
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>{_json(listed)}<|END_ACTION|>"


def _solar(calls: list[Call]) -> str:
    each = (
        f"<|tool_call:begin|>a1b2c3d4e{i}<|tool_call:name|>{name}<|tool_call:args|>{_json(arguments)}<|tool_call:end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|begin|>assistant<|tool_calls|>{''.join(each)}<|calls|>"


def _minimax_m3(calls: list[Call]) -> str:
    mark = minimax_m3.MARK

    def written(key: str, value: Any) -> str:
        inner = "".join(written("item", each) for each in value) if isinstance(value, list) else _tagged(value)
        return f"{mark}<{key}>{inner}{mark}</{key}>"

    def one(name: str, arguments: dict[str, Any]) -> str:
        return f'{mark}<invoke name="{name}">{"".join(written(*each) for each in arguments.items())}{mark}</invoke>\n'

    return f"{mark}<tool_call>\n{''.join(one(*call) for call in calls)}{mark}</tool_call>"


WRITERS: dict[str, Callable[[list[Call]], str]] = {
    "harmony": _harmony,
    "kimi_k2": _kimi,
    "deepseek_v3": _deepseek("<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>"),
    "deepseek_v31": _deepseek("<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>"),
    "mistral_v11": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}" for name, arguments in calls),
    "mistral": lambda calls: f"[TOOL_CALLS] {_list(calls)}",
    "glm45": _glm,
    "gemma4": _gemma,
    "qwen3_coder": _function_tags(function_tags.QWEN),
    "seed_oss": _function_tags(function_tags.SEED),
    "minimax_m2": _function_tags(function_tags.MINIMAX),
    "deepseek_v32": _function_tags(function_tags.DEEPSEEK_V32),
    "deepseek_v4": _function_tags(function_tags.DEEPSEEK_V4),
    "cohere_command3": _cohere,
    "cohere_command4": _cohere,
    "hermes": lambda calls: "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>' for name, arguments in calls
    ),
    "llama3_json": _llama,
    "pythonic": lambda calls: f"[{_python(calls)}]",
    "granite": lambda calls: f"<|tool_call|>{_list(calls)}",
    "nemotron_json": lambda calls: f"<TOOLCALL>{_list(calls)}</TOOLCALL>",
    "hunyuan_a13b": lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>",
    "apertus": lambda calls: f"<|tools_prefix|>{_json([{name: a} for name, a in calls])}<|tools_suffix|>",
    "lfm2": lambda calls: f"<|tool_call_start|>[{_python(calls)}]<|tool_call_end|>",
    "apriel": lambda calls: f"<tool_calls>{_list(calls)}</tool_calls>",
    "solar_open": _solar,
    "minimax_m3": _minimax_m3,
    "olmo3": lambda calls: f"<function_calls>\n{_python(calls, chr(10))}\n</function_calls>",
}
SPOKEN = {"harmony", "solar_open", "llama3_json", "pythonic"}  # formats without text before calls


def drawn(name: str, drawing: random.Random) -> tuple[str, str, list[Call], bool]:
    """Return the text before calls, the whole answer, the calls, and whether an argument quotes the format's markup."""
    tags = next(each.tags for each in FORMATS if each.name == name)
    quotes = drawing.random() < 0.2
    words = (*WORDS, *tags) if quotes else WORDS

    def text() -> str:
        return "".join(drawing.choice(words) for _ in range(drawing.randint(0, 4)))

    def arguments() -> dict[str, Any]:
        every: dict[str, Any] = {
            "s": text(),
            "t": text(),
            "n": drawing.randint(-9, 10**6),
            "l": [drawing.randint(0, 9), "x"],
        }
        return {key: every[key] for key in drawing.sample(list(every), drawing.randint(0, 4))}

    known = NAMES[:3] if name == "pythonic" else NAMES
    calls = [(drawing.choice(known), arguments()) for _ in range(1 if name == "harmony" else drawing.randint(1, 3))]
    said = "" if name in SPOKEN else drawing.choice(("", "I look.", "Tag < and [x].", "日本."))
    is_quoted = any(
        tag in value for tag in tags for _, given in calls for value in given.values() if isinstance(value, str)
    )
    return said, said + WRITERS[name](calls), calls, is_quoted


def read_calls(name: str, text: str, cuts: list[int] | None, *, tags: bool, is_cut: bool = False) -> list[Read]:
    answers, tokenizer = format_of(name, tags=tags)
    assert answers.tools is not None
    parser = answers.parser(Thinking.CLOSED, dict.fromkeys(NAMES, SCHEMA))
    known = answers.tools.tags if tags else ()
    token_ids = [tokenizer.id_of(chunk) for chunk in chunked(text, known, cuts)]
    return [
        part[:3] for part in told(parts_of(parser, token_ids, is_cut=is_cut))
    ]  # without the ids of calls, which may be random


def _ends(name: str, text: str, *, tags: bool) -> Iterator[int]:
    """Yield the positions at which an answer may be cut off: not inside a tag that is one token."""
    known = next(each.tags for each in FORMATS if each.name == name)
    inside = {
        at
        for found in re.finditer("|".join(map(re.escape, sorted(known, key=len, reverse=True))), text)
        for at in range(found.start() + 1, found.end())
    }
    yield from (at for at in range(len(text)) if not tags or at not in inside)


def check(name: str, drawing: random.Random) -> None:
    said, text, calls, is_quoted = drawn(name, drawing)
    tags = drawing.random() < 0.5
    size = len(text.encode())
    whole = read_calls(name, text, [], tags=tags)
    for cuts in (None, [drawing.randrange(size)], sorted(drawing.sample(range(size), min(size, 8)))):
        assert read_calls(name, text, cuts, tags=tags) == whole, (name, text, cuts)
    end = drawing.choice(list(_ends(name, text, tags=tags)))
    cut = read_calls(name, text[:end], [], tags=tags, is_cut=True)
    assert read_calls(name, text[:end], None, tags=tags, is_cut=True) == cut, (name, text[:end])
    if is_quoted:
        return
    shown = "".join(part[1] for part in whole if part[0] == "text")
    assert shown.strip() == said.strip(), (name, text, whole)
    assert said.startswith("".join(part[1] for part in cut if part[0] == "text").rstrip()), (name, text[:end], cut)
    found = [(part[1], json.loads(part[2])) for part in whole if part[0] == "call"]
    assert found == calls, (name, text, whole)


@pytest.mark.parametrize("name", ["hermes", "granite", "lfm2", "olmo3"])
def test_calls_that_a_format_writes_into_a_history_are_those_that_it_reads(name: str) -> None:
    spell = next(each.spell for each in FORMATS if each.name == name)
    values = {"s": 'a "b"\n日', "n": -1, "b": True, "z": None, "l": [1, "x"], "o": {"k": [True, {"q": None}]}}
    calls = [("f", values), ("run-it_2", {}), ("note", {"t": ""})]
    found = read_calls(name, spell(calls), [], tags=True)
    assert [(part[0], part[1], json.loads(part[2])) for part in found if part[0] == "call"] == [
        ("call", *call) for call in calls
    ]


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_drawn_calls_are_read_the_same_however_they_are_cut_and_show_no_markup(name: str) -> None:
    drawing = random.Random(name)
    for _ in range(SAMPLE):
        check(name, drawing)


def main(count: int) -> None:
    drawing = random.Random(count)
    for i in range(count):
        check(FORMATS[i % len(FORMATS)].name, drawing)
        if (i + 1) % 10_000 == 0:
            print(f"{i + 1} so far", flush=True)
    print(f"{count} drawn calls of {len(FORMATS)} formats: the same however they are cut, no markup shown")


if __name__ == "__main__":
    main(int(sys.argv[1]))
