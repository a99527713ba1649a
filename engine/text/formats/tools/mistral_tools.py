"""Tool calls in the format of Mistral's models, after the token `[TOOL_CALLS]`.

Up to version 7 of their tokenizers the token precedes a list of objects with a name and arguments. From version 11 on it precedes each call: a name,
sometimes an id, and the arguments, as in `[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}`. The parser accepts both forms. Ids are nine letters and
digits; templates refuse other ids. Source: mistralai/mistral-common, tokens/tokenizers/instruct.py.
"""

import re
import secrets
import string
from functools import partial

from pilotlight.engine.text.formats import values
from pilotlight.engine.text.formats.grammars import Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools import json_lists

OPEN, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
TAGS = (OPEN, ARGUMENTS, CALL_ID)
LIST = json_lists.ListFormat((OPEN,))

NAME = re.compile(r"[^\[{\n\ud800-\udfff]+")


def new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def read(s: Scanner) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    opens = s.markers[OPEN]
    while (yield from s.text_until((opens,))) is not None:
        before = s.out.num_calls
        if (yield from s.beyond_space()) == "[" and not (yield from s.starts(*s.markers.all())):
            yield from json_lists.calls(s, partial(values.call, new_id=new_id))
        else:
            yield from _call(s)
        if s.out.num_calls == before or s.was_cut:
            s.unread(opens)


def _call(s: Scanner) -> Reading[None]:
    name = (yield from s.run(NAME)).strip()
    call_id = ""
    if (yield from s.skip(s.markers[CALL_ID])):
        call_id = (yield from s.run(NAME)).strip()
    yield from s.skip(s.markers[ARGUMENTS])
    if name and (yield from s.beyond_space()) == "{":
        s.begin_call(name, call_id or new_id())
        yield from values.value(s, s.out.argue)
        s.end_call()


def write_named(grammar: Grammar, rules: AnswerRules, markers: Markers) -> None:
    """Add the rules of an answer with a token before each call to the grammar."""
    call_id = f"({markers.lark(CALL_ID)} /[a-zA-Z0-9]{{9}}/)? " if markers.is_token(CALL_ID) else ""
    calls = grammar.calls(rules, lambda name: f"{quoted(name)} {call_id}{markers.lark(ARGUMENTS)}")
    grammar.answer(rules, markers, OPEN, grammar.rule("body", calls), between='""')
