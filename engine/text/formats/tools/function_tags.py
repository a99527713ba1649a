"""Tool calls with tags for the function's name and for each argument, in the forms of several models.

<tool_call>
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>

This is the form of Qwen3-Coder, whose outer tags are tokens; models sometimes omit the first tag. Seed-OSS has other outer tags. MiniMax-M2 has one
section for all calls, and quoted names. So has DeepSeek V3.2, where an attribute of each argument tells whether its value is plain text or JSON; V4
differs in the name of the section. Sources: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct, ByteDance-Seed/Seed-OSS-36B-Instruct and
MiniMaxAI/MiniMax-M2, and encoding/encoding_dsv32.py of deepseek-ai/DeepSeek-V3.2.
"""

import json
import re
from typing import NamedTuple

from pilotlight.engine.text.formats.grammars import GAP, Grammar, quoted
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools import tagged


class TagForm(NamedTuple):
    """The tags of a model."""

    open: str
    close: str
    function: str  # the tag that starts a call, up to the name
    function_end: str
    parameter: str  # the tag that starts an argument, up to its name
    parameter_end: str
    quote: str = ""  # quotation mark after a name
    padding: str = ""  # text between a value and its tags
    is_typed: bool = False  # True if an attribute tells whether a value is a string
    is_section: bool = False  # True if the outer tags enclose all calls; False if they enclose each call

    @property
    def tags(self) -> tuple[str, ...]:
        return self[:6]

    @property
    def names(self) -> re.Pattern[str]:
        return _QUOTED_NAME if self.quote else tagged.NAME

    def key_end(self, is_string: str) -> str:
        """Return the text between an argument's name and its value. `is_string`: the value's attribute."""
        return f'{self.quote} string="{is_string}">' if self.is_typed else f"{self.quote}>"


QWEN = TagForm("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", padding="\n")
SEED = QWEN._replace(open="<seed:tool_call>", close="</seed:tool_call>", padding="")
MINIMAX = TagForm(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    '<invoke name="',
    "</invoke>",
    '<parameter name="',
    "</parameter>",
    quote='"',
    is_section=True,
)
DSML = "｜DSML｜"  # a token that is not special, so that the tags are text
DEEPSEEK_V32, DEEPSEEK_V4 = (
    TagForm(
        f"<{DSML}{section}>",
        f"</{DSML}{section}>",
        f'<{DSML}invoke name="',
        f"</{DSML}invoke>",
        f'<{DSML}parameter name="',
        f"</{DSML}parameter>",
        quote='"',
        is_typed=True,
        is_section=True,
    )
    for section in ("function_calls", "tool_calls")
)
_QUOTED_NAME = re.compile(r'[^<>"\n\ud800-\udfff]+')


def read(s: Scanner, form: TagForm) -> Reading[None]:
    """Parse text and calls to the end of the answer."""
    opens, closes, function, function_end, parameter, parameter_end = (s.markers[tag] for tag in form.tags)
    of_string, of_other = form.key_end("true"), form.key_end("false")
    tags = tagged.ValueTags(parameter_end, form.padding, (parameter, function_end, closes))
    outside = (opens,) if form.is_section else (opens, function)
    words: tuple[str, ...] = outside
    while (word := (yield from s.text_until(words))) is not None:
        if word == opens:
            yield from s.beyond_space()
            if not (yield from s.skip(function)):
                s.unread(word)
                continue
        name = (yield from s.run(form.names)).strip()
        if not name or not (yield from s.skip(f"{form.quote}>")):
            s.unread(word)
            continue
        s.begin_call(name)
        s.out.argue("{")
        count = 0
        while True:
            yield from s.beyond_space()
            if not (yield from s.skip(parameter)):
                break
            key = yield from s.run(form.names)
            key_end = yield from s.starts(of_string, of_other)
            if key_end is None:
                s.read(len(s.text) if s.was_cut else 0)
                break
            s.read(len(key_end))
            kinds = tagged.kinds_of_argument(key, s.schemas.get(name, {}))
            if form.is_typed:
                kinds = {"string"} if key_end == of_string else set()
            s.out.argue((", " if count else "") + json.dumps(key, ensure_ascii=False) + ": ")
            yield from tagged.value(s, kinds, tags)
            count += 1
        if not s.was_cut:
            s.out.argue("}")
        s.end_call()
        yield from s.skip(function_end)
        yield from s.beyond_space()
        words = outside if (yield from s.skip(closes)) else (opens, function)


def write(grammar: Grammar, rules: AnswerRules, markers: Markers, form: TagForm) -> None:
    """Add the rules of an answer to the grammar."""
    parameter, name_end, line_end = markers.lark(form.parameter), f"{form.quote}>", quoted("\n")
    tags = tagged.ValueGrammar(
        begin=f"{parameter} {quoted('KEY' + form.key_end('IS_STRING') + form.padding)}",
        free_begin=rf"{parameter} /[^<>\n{form.quote}]{{1,64}}/ {quoted(form.key_end('true') + form.padding)}",
        close=markers.lark(form.parameter_end),
        is_token=markers.is_token(form.parameter_end),
        padding=form.padding,
        behind=line_end,
    )
    calls = []
    for number, tool in enumerate(rules.tools):
        arguments = tagged.write(grammar, f"argument{number}", tool, tags)
        calls.append(grammar.rule(f"call{number}", f"{quoted(tool.name + name_end + chr(10))} {arguments}"))
    body = grammar.rule("body", " | ".join(calls))
    function = f"{line_end} {markers.lark(form.function)} {body} {markers.lark(form.function_end)}"
    if form.is_section and not rules.is_single:
        function = f"({grammar.rule('function', function)})+"
    rest = f"{function} {line_end} {markers.lark(form.close)}"
    grammar.answer(rules, markers, form.open, rest, between=None if form.is_section else GAP)
