"""The Prefer header (RFC 7240): preferences of a client that may be ignored silently.

Several headers form one list; if a preference is named twice, the first one counts; parameters belong to the preference before them. Malformed parts
are skipped. Independent of the meaning of preferences.
"""

import re
from collections.abc import Iterable

# A token, and after an equals sign (with "bad" white space) another one or a quoted string: preferences and parameters have the same form.
_TOKEN, _QUOTED = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", r'"(?:[^"\\]|\\.)*"'
_WORD = re.compile(rf"\s*({_TOKEN})(?:\s*=\s*({_TOKEN}|{_QUOTED})?)?\s*(?=[,;]|$)")
# The rest of a list's element: a comma inside quotes, or after an unclosed quote, does not end it. No character is examined more than twice.
_REST = re.compile(r'(?:"(?:[^"\\]|\\.)*"?|[^",])*')


def preferences(values: Iterable[str]) -> dict[str, str]:
    """Return a request's preferences by lower-case name, from its Prefer headers in order.

    A preference without a value has the value "".
    """
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
