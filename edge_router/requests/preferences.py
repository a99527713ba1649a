"""The Prefer header (RFC 7240): what a client would like, and may be refused silently.

Several headers are one list; of a preference named twice the first counts; parameters belong to the preference before them, and are none themselves.
What is malformed is passed over. Refuses to know what any preference means.
"""

import re
from collections.abc import Iterable

# A token, and behind an equals sign (with "bad" white space) another or a quoted string: a preference and a parameter look the same.
_TOKEN, _QUOTED = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", r'"(?:[^"\\]|\\.)*"'
_WORD = re.compile(rf"\s*({_TOKEN})(?:\s*=\s*({_TOKEN}|{_QUOTED})?)?\s*(?=[,;]|$)")
# Of a list's element: no comma inside quotes ends it, nor any behind a quote that nothing closes. None looks at a character more than twice.
_REST = re.compile(r'(?:"(?:[^"\\]|\\.)*"?|[^",])*')


def preferences(values: Iterable[str]) -> dict[str, str]:
    """Of a request's Prefer headers, in order: each preference's name, lower case, and its value, empty where it has none."""
    found: dict[str, str] = {}
    for value in values:
        at = 0
        while at < len(value):
            if (word := _WORD.match(value, at)) is not None:
                name, given = word[1].lower(), word[2] or ""
                found.setdefault(name, _unquoted(given))
                at = word.end()
            rest = _REST.match(value, at)
            assert rest is not None
            at = rest.end() + 1
    return found


def _unquoted(word: str) -> str:
    return re.sub(r"\\(.)", r"\1", word[1:-1]) if word.startswith('"') else word
