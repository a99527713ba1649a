"""An incremental parser of JSON as models write it: valid values stay unchanged, others are repaired.

Invalid numbers and words become strings. Python's True, False and None become their JSON literals. Unpaired surrogates become U+FFFD. Control
characters inside a string, and backslashes that start no escape, are escaped. Brackets and commas are not repaired: if a model forgets one, the
arguments are not JSON, as with other servers. RFC 8259 has the grammar.
"""

import json
import re
from collections.abc import Callable, Container
from contextlib import suppress

import msgspec

from pilotlight.engine.text.formats.scanner import Reading, Scanner

Put = Callable[[str], object]

MOST_OF_A_NAME = 512  # most characters of a name
MOST_OF_A_SCALAR = 400  # most characters held back until a number or literal ends: no useful number is longer
CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type", "tool_call_id"})

_PLAIN = re.compile(r'[^"\'\\\x00-\x1f\ud800-\udfff]+')
_SCALAR = re.compile(r"""[^\s,:{}\[\]()"'<\ud800-\udfff]+""")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_CODE = re.compile(r"\\u[0-9a-fA-F]{4}")
_OPENING, _CLOSING, _STRUCTURE = "{[(", "}])", "}]),:<"
_LISTS = {"(": "[", ")": "]"}  # Python's tuples become JSON arrays
_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])


def value(s: Scanner, put: Put, *, quote: str = "") -> Reading[bool]:
    """Parse a value and output it; return False if it is missing or incomplete.

    It is incomplete if the answer ends within it, or a marker occurs outside its strings. `quote`: marker on either side of a string without escapes;
    then keys need no quotes.
    """
    depth = 0
    while True:
        first = yield from s.beyond_space(put if depth else None)
        if not first:
            return False
        marker = yield from s.starts(*s.markers.all())
        if marker is not None and marker != quote:
            return False
        if marker is not None:
            if not (yield from _marked_string(s, put, quote)):
                return False
        elif first in "\"'":
            if not (yield from string(s, put)):
                return False
        elif first in _OPENING:
            depth += 1
            put(_LISTS.get(first, first))
            s.read(1)
        elif not depth and first in _STRUCTURE:
            return False
        elif first in _STRUCTURE:
            depth -= first in _CLOSING
            put(_LISTS.get(first, first))
            s.read(1)
        else:
            yield from _scalar(s, put, may_be_key=bool(quote))
        if not depth:
            return True


def string(s: Scanner, put: Put) -> Reading[bool]:
    """Parse a string in either kind of quotes, and output it as JSON; return whether it is complete.

    A tag inside, such as `</tool_call>`, is text; another marker token ends the string, which is then incomplete.
    """
    quote = s.read(1)
    put('"')
    while first := (yield from s.first()):
        if run := _PLAIN.match(s.text):
            put(s.read(run.end()))
        elif first == quote:
            s.read(1)
            put('"')
            return True
        elif first == "\\":
            put((yield from _escape(s)))
        elif "\ud800" <= first <= "\udfff":
            if not s.markers.is_quotable(first):
                return False
            put(escaped(s.markers.as_text(s.read(1))))
        else:
            put(escaped(s.read(1)))
    return False


def as_json(text: str, s: Scanner) -> str:
    """Return a text as a JSON value: unchanged if it is valid JSON, repaired if possible, else a string."""
    alone = Scanner.of_whole(s.markers, text.strip())
    found: list[str] = []
    reading = value(alone, found.append)
    try:
        next(reading)
    except StopIteration as ending:
        if ending.value and not alone.text.strip():
            with suppress(ValueError, RecursionError):
                msgspec.json.decode("".join(found), type=msgspec.Raw)
                return "".join(found)
    return f'"{escaped(text)}"'


def escaped(text: str) -> str:
    """Escape a text for use inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def name(s: Scanner) -> Reading[str | None]:
    """Parse a JSON string of limited length; return None if it is incomplete, invalid or empty."""
    raw = ""
    if (yield from s.beyond_space()) != '"':
        return None
    raw = s.read(1)
    while len(raw) < MOST_OF_A_NAME:
        first = yield from s.first()
        if first == '"':
            break
        if first == "\\":
            while len(s.text) < 2 and not s.has_ended:
                yield
            raw += s.read(2)
        elif run := _PLAIN.match(s.text):
            raw += s.read(run.end())
        elif first == "'":
            raw += s.read(1)
        else:
            return None
    try:
        return msgspec.json.decode(raw + s.read(1), type=str) or None
    except ValueError:
        return None


def call(
    s: Scanner,
    *,
    only: Container[str] | None = None,
    new_id: Callable[[], str] | None = None,
    name_key: str = "name",
) -> Reading[bool]:
    """Parse and output a call: an object with a name and arguments, in either order.

    Returns False, without any output, if it is not a call. `only`: accept only these tools, and require arguments. `new_id`: makes an id for a call
    without one.
    """
    if (yield from s.beyond_space()) != "{":
        return False
    s.read(1)
    yield from s.skip("{")  # Qwen2.5-Coder's template asks for two braces by mistake
    called: str | None = None
    call_id: str | None = None
    arguments: list[str] | None = None  # arguments that preceded the name
    has_started = False
    while (first := (yield from s.beyond_space())) not in ("", "}"):
        if first == "," and s.read(1):
            continue
        key = yield from name(s)
        if (yield from s.beyond_space()) != ":" or not (key == name_key or key in CALL_KEYS or has_started):
            return has_started
        s.read(1)
        if key == name_key and called is None:
            called = yield from name(s)
            if called is None or (only is not None and called not in only):
                return False
        elif key == "id" and not has_started:
            call_id = yield from name(s)
        elif key in ("arguments", "parameters") and not has_started:
            if called is None:
                arguments = []
                if not (yield from value(s, arguments.append)):
                    return False
            elif not (yield from _arguments(s, called, call_id or (new_id and new_id()))):
                return False
            else:
                has_started = True
        elif not (yield from value(s, drop)):
            return has_started
    if not has_started:
        given = _object_of("".join(arguments) if arguments is not None else "{}")
        if called is None or given is None or first != "}" or (only is not None and arguments is None):
            return False
        s.begin_call(called, call_id or (new_id and new_id()))
        s.out.argue(given)
        s.end_call()
    s.read(1)
    return True


def _arguments(s: Scanner, called: str, call_id: str | None) -> Reading[bool]:
    """Output a call's arguments as they arrive; return False if they are not an object.

    Some models encode the object once more as a string, whose content is output when the string is complete.
    """
    first = yield from s.beyond_space()
    if first == "{":
        s.begin_call(called, call_id)
        yield from value(s, s.out.argue)
        s.end_call()
        return True
    raw: list[str] = []
    given = _object_of("".join(raw)) if (yield from value(s, raw.append)) else None
    if given is not None:
        s.begin_call(called, call_id)
        s.out.argue(given)
        s.end_call()
    return given is not None


def _object_of(text: str) -> str | None:
    """Return a JSON object's text, also if it is encoded as a string; {} for null; None for anything else."""
    try:
        if text.startswith('"'):
            text = msgspec.json.decode(text, type=str)
        if text == "null":
            text = "{}"
        _objects.decode(text)
    except (ValueError, RecursionError):
        return None
    return text


def _marked_string(s: Scanner, put: Put, quote: str) -> Reading[bool]:
    """Parse a string between two markers, in which everything but a marker token is text."""
    s.read(len(quote))
    put('"')
    tokens = [marker for marker in s.markers.all() if "\ud800" <= marker <= "\udfff"]
    word = yield from s.until((quote, *tokens), lambda text: put(escaped(s.markers.as_text(text))))
    if word != quote:
        return False
    s.read(len(quote))
    put('"')
    return True


def _scalar(s: Scanner, put: Put, *, may_be_key: bool = False) -> Reading[None]:
    text = ""
    while len(text) < MOST_OF_A_SCALAR:
        if run := _SCALAR.match(s.text):
            text = run[0]
        if run is None or run.end() < len(s.text) or s.has_ended:
            break
        yield
    s.read(len(text))
    is_key = may_be_key and (yield from s.first()) == ":"
    if not is_key and (_NUMBER.fullmatch(text) or text in _WORDS):
        put(_WORDS.get(text, text))
        return
    put('"' + escaped(text))
    while len(text) >= MOST_OF_A_SCALAR and (yield from s.first()) and (run := _SCALAR.match(s.text)):
        put(escaped(s.read(run.end())))
    put('"')


def _escape(s: Scanner) -> Reading[str]:
    """Consume a backslash and the escape that follows it; return a valid JSON escape."""
    while len(s.text) < (6 if s.text[1:2] == "u" else 2):
        if s.has_ended:
            s.read(len(s.text))
            return ""
        yield
    if _HIGH.match(s.text):
        while not s.has_ended and len(s.text) < 12 and _may_go_on(s.text[6:]):
            yield
        return s.read(12) if _LOW.match(s.text, 6) else _replaced(s)
    if _LOW.match(s.text):
        return _replaced(s)
    if _CODE.match(s.text):
        return s.read(6)
    if s.text[1:2] == "'":
        return s.read(2)[1]
    if s.text[1:2] in tuple('"\\/bfnrt'):
        return s.read(2)
    return "\\" + s.read(1)


def _may_go_on(text: str) -> bool:
    return "\\u".startswith(text[:2]) and len(text) < 6


def _replaced(s: Scanner) -> str:
    s.read(6)
    return "\\ufffd"


def drop(text: str) -> None:
    """Ignore text, such as that between the parts of a format."""
