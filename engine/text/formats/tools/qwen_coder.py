"""Tool calls in the format of Qwen3-Coder: tags for the function's name and for each argument.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>

Source: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct. The outer tags are tokens; models sometimes omit the first tag.
"""

import json

from pilotlight.engine.text.formats.grammars import GAP, Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools import tagged

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
TAGS = (OPEN, CLOSE, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)


def read(s: Scanner) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    opens, closes, function, function_end, parameter, parameter_end = (s.markers[tag] for tag in TAGS)
    tags = tagged.ValueTags(parameter_end, "\n", (parameter, function_end, closes))
    while (word := (yield from s.text_until((opens, function)))) is not None:
        if word == opens:
            yield from s.beyond_space()
            if not (yield from s.skip(function)):
                s.unread(word)
                continue
        name = (yield from s.run(tagged.NAME)).strip()
        if not name or not (yield from s.skip(">")):
            s.unread(word)
            continue
        s.begin_call(name)
        s.out.argue("{")
        count = 0
        while True:
            yield from s.beyond_space()
            if not (yield from s.skip(parameter)):
                break
            key = yield from s.run(tagged.NAME)
            if not (yield from s.skip(">")):
                break
            s.out.argue((", " if count else "") + json.dumps(key, ensure_ascii=False) + ": ")
            yield from tagged.value(s, key, s.schemas.get(name, {}), tags)
            count += 1
        if not s.was_cut:
            s.out.argue("}")
        s.end_call()
        yield from s.skip(function_end)
        yield from s.beyond_space()
        yield from s.skip(closes)


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer to the grammar."""
    tags = tagged.ValueGrammar(
        begin=f'{markers.lark(PARAMETER)} "KEY>\\n"',
        free_begin=rf'{markers.lark(PARAMETER)} /[^<>\n]{{1,64}}/ ">\n"',
        close=markers.lark(PARAMETER_END),
        is_token=markers.is_token(PARAMETER_END),
        padding="\n",
        behind=quoted("\n"),
    )
    calls = []
    for number, tool in enumerate(rules.tools):
        arguments = tagged.write(grammar, f"argument{number}", tool, tags)
        calls.append(grammar.rule(f"call{number}", f"{quoted(f'{tool.name}>{chr(10)}')} {arguments}"))
    body = grammar.rule("body", " | ".join(calls))
    line_end = quoted("\n")
    function = f"{markers.lark(FUNCTION)} {body} {markers.lark(FUNCTION_END)}"
    grammar.answer(rules, markers, OPEN, f"{line_end} {function} {line_end} {markers.lark(CLOSE)}", between=GAP)
