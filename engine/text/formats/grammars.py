"""Grammars of answers, in llguidance's dialect of Lark, whose syntax is in its docs/syntax.md."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parts import AnswerRules, CallableTool
from pilotlight.engine.text.formats.subschemas import with_subschemas

TEXT = r"/(.|\n)*/"
# Rule of the line ends after reasoning and after a call. It is bounded, like white space in documents, because a model might output nothing else.
GAP = r"/\n{0,2}/"
# Optional white space inside a document: a space, or a line end and indentation. Weak models otherwise fill answers with spaces.
WHITE_SPACE = r"[ \t]|\r?\n[ \t]{0,64}"
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


class Grammar:
    """The rules of a grammar, in the order in which they are added. One of them is `answer`."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def rule(self, name: str, right: str) -> str:
        """Add a rule, and return its name."""
        self._lines.append(f"{name}: {right}")
        return name.partition("[")[0]

    def json(self, name: str, schema: dict[str, Any], *, is_lenient: bool = False) -> str:
        """Add a rule for JSON documents that match a schema, on one line, as models write arguments.

        `is_lenient`: see CallableTool.
        """
        options = {"whitespace_pattern": " ", **({"lenient": True} if is_lenient else {})}
        return self.rule(name, f"%json {json.dumps({**asserting(schema), 'x-guidance': options}, ensure_ascii=False)}")

    def arguments(self, number: int, tool: CallableTool) -> str:
        """Add a rule for a tool's arguments as one JSON document."""
        return self.json(f"arguments{number}", tool.schema, is_lenient=tool.is_lenient)

    def calls(self, rules: AnswerRules, begin: Callable[[str], str], end: str = "") -> str:
        """Add a rule for a call of each tool, and return the alternative of these rules.

        A call is begin(name of the tool), its arguments as one JSON document, and `end`.
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
        """Add the rule of an answer whose calls are in sections, each of which is `tag` and `rest`.

        `between`: rule of the text after each section, where another may follow; None if only one section is allowed.
        """
        section = self.rule("section", f"{markers.lark(tag)} {rest}")
        is_one = rules.is_single or between is None
        sections = section if is_one else f"{section} ({between} {section})* {between}"
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
        """Add the rule of an answer that consists of calls or contains none.

        `free`: rule of text that does not start like a call.
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
    """Return the right side of a Lark rule that matches what a constraint allows."""
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
    """Return a regular expression that matches one of the texts.

    Alternatives in a Lark rule would be limited to 2,000, because each takes up one item in llguidance's parser.
    """
    return "(?:" + "|".join(map(re.escape, texts)) + ")"


def asserting(schema: Any) -> Any:
    """Return a schema without nonstandard formats such as "path", which require nothing in JSON Schema.

    Integral sizes become integers: 1.0 becomes 1.
    """
    if isinstance(schema, list):
        return [asserting(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: whole(part) if key in _SIZES else part
        for key, part in with_subschemas(schema, asserting).items()
        if not (key == "format" and isinstance(part, str) and part not in _FORMATS)
    }


def whole(value: Any) -> Any:
    """Convert an integral float to an integer; return any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def in_slashes(pattern: str) -> str:
    """Return a regular expression as a terminal of the grammar."""
    return "/" + re.sub(r"\\.|/|\n", _in_slashes, pattern, flags=re.DOTALL) + "/"


def _in_slashes(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])
