"""Grammars of answers, in the Lark dialect that llguidance reads: its docs/syntax.md has the syntax."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules, CallableTool

TEXT = r"/(.|\n)*/"
# White space between a document's parts, if any: a few spaces, or a line end and its indentation. Bounded, or a model may output nothing else.
WHITE_SPACE = r"[ \t]{1,8}|\r?\n[ \t]{0,64}"
_FORMATS = {
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri",
    "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex",
}  # fmt: skip
_SIZES = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_VALUES = ("enum", "const", "default", "examples")  # keys of a schema whose values are not schemas


class Grammar:
    """A grammar's rules, collected as they are written. One of them is `answer`."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def rule(self, name: str, right: str) -> str:
        """Add a rule, and return its name."""
        self._lines.append(f"{name}: {right}")
        return name.partition("[")[0]

    def json(self, name: str, schema: dict[str, Any], *, is_lenient: bool = False) -> str:
        """Add a rule for documents of a schema, on one line, as models write arguments.

        `is_lenient`: as in CallableTool.
        """
        options = {"whitespace_pattern": " ", **({"lenient": True} if is_lenient else {})}
        return self.rule(name, f"%json {json.dumps({**asserting(schema), 'x-guidance': options}, ensure_ascii=False)}")

    def arguments(self, number: int, tool: CallableTool) -> str:
        """Add a rule for a tool's arguments as one document."""
        return self.json(f"arguments{number}", tool.schema, is_lenient=tool.is_lenient)

    def calls(self, rules: AnswerRules, begin: Callable[[str], str], end: str = "") -> str:
        """Add a rule for a call of each tool, and return their alternatives.

        A call's arguments are one document, after `begin` of the tool's name and before `end`.
        """
        calls = [
            self.rule(f"call{number}", f"{begin(tool.name)} {self.arguments(number, tool)} {end}".rstrip())
            for number, tool in enumerate(rules.tools)
        ]
        return " | ".join(calls)

    def up_to(self, name: str, marker: str, *, is_token: bool) -> str:
        """Add a rule for any text up to and including the first occurrence of a marker."""
        return self.rule(name, f"{TEXT} {marker}") if is_token else self.rule(f"{name}[lazy]", f"{TEXT} {marker}")

    def answer(self, rules: AnswerRules, markers: Markers, tag: str, rest: str, *, between: str | None = None) -> None:
        """Add the rule of an answer whose calls are in sections, each starting with a tag.

        `between`: allowed text between two sections; None if there is only one.
        """
        section = self.rule("section", f"{markers.lark(tag)} {rest}")
        is_one = rules.is_single or between is None
        sections = section if is_one else f"{section} ({between} {section})*"
        if rules.document is not None:
            self.rule("answer", f"{sections} | document")
            self.rule("document", rules.document)
        elif not rules.may_be_text:
            self.rule("answer", sections)
        elif markers.is_token(tag):
            self.rule("answer", f"text ({section} text){'?' if is_one else '*'}")
            self.rule("text", TEXT)
        else:
            spoken = self.up_to("spoken", markers.lark(tag), is_token=False)
            self.rule("answer", f"({spoken} {rest}){'?' if is_one else '*'} text")
            self.rule("text", TEXT)

    def whole(self, rules: AnswerRules, calls: str, free: str) -> None:
        """Add the rule of an answer that is either calls or something else.

        `free`: text that does not start like calls.
        """
        if rules.document is not None:
            self.rule("answer", f"{self.rule('calls', calls)} | document")
            self.rule("document", rules.document)
        else:
            self.rule(
                "answer", f"{self.rule('calls', calls)} | {self.rule('free', free)}?" if rules.may_be_text else calls
            )


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def document(constraint: Constraint) -> str:
    """Return a constraint as the right side of a rule."""
    match constraint.kind:
        case "json_schema":
            schema = asserting(json.loads(constraint.text))
            return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITE_SPACE}})}"
        case "regex":
            return in_slashes(constraint.text)
        case "choice":
            return in_slashes(any_of(json.loads(constraint.text)))
        case "lark":
            return f"%lark {{\n{constraint.text}\n}}"


def any_of(texts: Sequence[str]) -> str:
    """Return a pattern of some texts.

    A rule can have at most 2,000 alternatives, which are items of a parser's row.
    """
    return "(?:" + "|".join(map(re.escape, texts)) + ")"


def asserting(schema: Any) -> Any:
    """Return a schema without nonstandard formats such as "path", which demand nothing in JSON Schema.

    Sizes that are whole numbers are written as integers: 1.0 becomes 1.
    """
    if isinstance(schema, list):
        return [asserting(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: part if key in _VALUES else whole(part) if key in _SIZES else asserting(part)
        for key, part in schema.items()
        if not (key == "format" and isinstance(part, str) and part not in _FORMATS)
    }


def whole(value: Any) -> Any:
    """Return 1 for 1.0, and so on; anything else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def in_slashes(pattern: str) -> str:
    """Return a regular expression as a terminal."""
    return "/" + re.sub(r"\\.|/|\n", _in_slashes, pattern, flags=re.DOTALL) + "/"


def _in_slashes(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])
