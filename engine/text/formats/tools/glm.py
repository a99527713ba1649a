"""Tool calls in the format of GLM-4.5: a name, then keys and values alternately, each in tags.

<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>Paris</arg_value>
</tool_call>

Source: the chat template of zai-org/GLM-4.5. GLM-4.6 and 4.7 write the same, with fewer line ends.
"""

import json

from pilotlight.engine.text.formats.grammars import GAP, Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools import tagged

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
TAGS = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)


def read(s: Scanner) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    opens, closes, key_tag, key_end, value_tag, value_end = (s.markers[tag] for tag in TAGS)
    tags = tagged.ValueTags(value_end, "", (key_tag, closes))
    while (yield from s.text_until((opens,))) is not None:
        yield from s.beyond_space()
        name = (yield from s.run(tagged.NAME)).strip()
        yield from s.beyond_space()
        if not name or (yield from s.starts(key_tag, closes)) is None:
            s.unread(opens)
            continue
        s.begin_call(name)
        s.out.argue("{")
        count = 0
        while (yield from s.skip(key_tag)):
            key = yield from s.run(tagged.NAME)
            yield from s.skip(key_end)
            yield from s.beyond_space()
            if not (yield from s.skip(value_tag)):
                break
            s.out.argue((", " if count else "") + json.dumps(key, ensure_ascii=False) + ": ")
            yield from tagged.value(s, tagged.kinds_of_argument(key, s.schemas.get(name, {})), tags)
            yield from s.beyond_space()
            count += 1
        if not s.was_cut:
            s.out.argue("}")
        s.end_call()
        yield from s.skip(closes)


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer to the grammar."""
    key, key_end, value = markers.lark(KEY), markers.lark(KEY_END), markers.lark(VALUE)
    tags = tagged.ValueGrammar(
        begin=f'{key} "KEY" {key_end} {quoted(chr(10))} {value}',
        free_begin=rf"{key} /[^<>\n]{{1,64}}/ {key_end} {quoted(chr(10))} {value}",
        close=markers.lark(VALUE_END),
        is_token=markers.is_token(VALUE_END),
        padding="",
        behind=quoted("\n"),
    )
    calls = []
    for number, tool in enumerate(rules.tools):
        arguments = tagged.write(grammar, f"argument{number}", tool, tags)
        calls.append(grammar.rule(f"call{number}", f"{quoted(tool.name + chr(10))} {arguments}"))
    body = grammar.rule("body", " | ".join(calls))
    grammar.answer(rules, markers, OPEN, f"{body} {markers.lark(CLOSE)}", between=GAP)
