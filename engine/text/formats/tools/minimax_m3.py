"""Tool calls in the format of MiniMax-M3: tags after a token, also for each part of a value.

]<]minimax[>[<tool_call>
]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<days>]<]minimax[>[<item>3]<]minimax[>[</item>]<]minimax[>[</days>]<]minimax[>[</invoke>
]<]minimax[>[</tool_call>

Source: the chat template of MiniMax-M3. Grammars write the values of objects and arrays as JSON, so that their schemas are enforced. The parser
accepts both forms.
"""

import json
import re
from typing import Any

from pilotlight.engine.text.formats.grammars import Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools import tagged

MARK = "]<]minimax[>["
TAGS = (MARK,)
OPEN, CLOSE, INVOKE, INVOKE_END = "<tool_call>", "</tool_call>", '<invoke name="', "</invoke>"
MOST_DEPTH = 32  # of objects and arrays in a value; deeper parts are text

NAME = re.compile(r'[^<>"\n\ud800-\udfff]+')


def read(s: Scanner) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    mark = s.markers[MARK]
    opens, closes, invoke, invoke_end = (mark + tag for tag in (OPEN, CLOSE, INVOKE, INVOKE_END))
    words: tuple[str, ...] = (opens,)
    while (word := (yield from s.text_until(words))) is not None:
        if word in (closes, invoke_end):
            s.release()
            s.out.drop_space()
            continue
        if word == opens:
            yield from s.beyond_space()
            if not (yield from s.skip(invoke)):
                s.unread(word)
                continue
        name = (yield from s.run(NAME)).strip()
        if not name or not (yield from s.skip('">')):
            s.unread(word)
            continue
        s.begin_call(name)
        schema = s.schemas.get(name, {})
        yield from _members(s, schema, schema, 0, is_list=False)
        s.end_call()
        yield from s.skip(invoke_end)
        yield from s.beyond_space()
        words = (opens,) if (yield from s.skip(closes)) else (opens, invoke, closes, invoke_end)


def _members(s: Scanner, given: Any, root: dict[str, Any], depth: int, *, is_list: bool) -> Reading[None]:
    """Parse the fields of an object or the items of an array, and output it as JSON."""
    schema = tagged.referred(given, root)
    s.out.argue("[" if is_list else "{")
    count = 0
    while (yield from s.beyond_space()) and (yield from _is_member(s)):
        s.read(len(s.markers[MARK]) + 1)
        key = yield from s.run(tagged.NAME)
        if not (yield from s.skip(">")):
            break
        label = "" if is_list else f"{json.dumps(key, ensure_ascii=False)}: "
        s.out.argue((", " if count else "") + label)
        member = schema.get("items") if is_list else tagged.properties_of(schema).get(key)
        yield from _value(s, key, member, root, depth)
        count += 1
    if not s.was_cut:
        s.out.argue("]" if is_list else "}")


def _value(s: Scanner, key: str, given: Any, root: dict[str, Any], depth: int) -> Reading[None]:
    mark, kinds = s.markers[MARK], tagged.kinds_of(given, root)
    close = f"{mark}</{key}>"
    is_empty = yield from s.starts(close)
    if depth < MOST_DEPTH and ((yield from _is_member(s)) or (is_empty and kinds in ({"array"}, {"object"}))):
        is_list = (yield from s.starts(f"{mark}<item>")) is not None and kinds != {"object"}
        yield from _members(s, given, root, depth + 1, is_list=is_list or kinds == {"array"})
        if not (yield from s.skip(close)) and s.was_cut:
            s.read(len(s.text))
    else:
        yield from tagged.value(s, kinds, tagged.ValueTags(close, "", (mark,)))


def _is_member(s: Scanner) -> Reading[bool]:
    """Return True if a tag comes next that starts a field or item."""
    opens = f"{s.markers[MARK]}<"
    return (yield from s.starts(opens, f"{opens}/")) == opens


def write(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer to the grammar."""
    mark, is_token = markers.lark(MARK), markers.is_token(MARK)
    close = f'{mark} "</KEY>"' if is_token else quoted(f"{MARK}</KEY>")
    tags = tagged.ValueGrammar(f'{mark} "<KEY>"', free_begin="", close=close, is_token=is_token, padding="", behind="")
    calls = []
    for number, tool in enumerate(rules.tools):
        arguments = tagged.write(grammar, f"argument{number}", tool, tags)
        begin = quoted(f'{INVOKE}{tool.name}">')
        calls.append(grammar.rule(f"call{number}", f"{mark} {begin} {arguments} {mark} {quoted(INVOKE_END + chr(10))}"))
    call = grammar.rule("call", " | ".join(calls))
    section = f"{call if rules.is_single else f'{call}+'} {mark} {quoted(CLOSE)}"
    grammar.answer(rules, markers, MARK, f"{quoted(OPEN + chr(10))} {section}")
