"""The files `_redirects` and `_headers` of an assets folder: redirects of paths, and response headers.

An invalid line is logged with its number and skipped, as on the platform; the other lines apply.
"""

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote, urlsplit

MAX_FILE_BYTES = 1 << 20
MAX_REDIRECTS = 2100  # as documented: 2,000 static redirects and 100 with patterns
MAX_HEADER_RULES = 100
MAX_LINE = 2000
CODES = (200, 301, 302, 303, 307, 308)
REDIRECTS, HEADERS = "_redirects", "_headers"

_PLACEHOLDER = re.compile(r":([A-Za-z]\w*)|\*")
_HEADER_NAME = re.compile(r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")

log = logging.getLogger("pilotlight.bindings")

Pairs = list[tuple[str, str]]
Lines = list[tuple[int, str]]
Complain = Callable[[int, str], None]
Rule = TypeVar("Rule")


class RedirectRule(NamedTuple):
    pattern: re.Pattern[str]
    has_host: bool
    to: str
    code: int


class HeaderRule(NamedTuple):
    pattern: re.Pattern[str]
    has_host: bool
    added: tuple[tuple[str, str], ...]
    removed: tuple[str, ...]


class Rewrite(NamedTuple):
    """Serve the file at `path` instead of the requested one, without a redirect."""

    path: str


class AssetRules:
    def __init__(self, folder: Path) -> None:
        self._redirects = tuple(_read(folder / REDIRECTS, _redirects_of))
        self._headers = tuple(_read(folder / HEADERS, _header_rules_of))

    def redirect(self, url: str) -> "tuple[int, str] | Rewrite | None":
        """Return (status, location) or the Rewrite of the first rule that matches; None if none does."""
        if not self._redirects:
            return None
        parts = urlsplit(url)
        for rule in self._redirects:
            found = match_pattern(rule.pattern, rule.has_host, parts.netloc, parts.path or "/")
            if found is None:
                continue
            to = _filled(rule.to, found)
            if rule.code == 200:
                return Rewrite(urlsplit(to).path)
            try:
                target = urlsplit(to)
            except ValueError:  # the filled-in target has an invalid host
                return None
            if parts.query and not target.query:
                to = target._replace(query=parts.query).geturl()
            return rule.code, to
        return None

    def applied(self, url: str, headers: Pairs) -> Pairs:
        """Apply the header rules in order.
        The first rule that sets a header replaces the default value; later rules append to it."""
        if not self._headers:
            return headers
        parts, said = urlsplit(url), set[str]()
        for rule in self._headers:
            found = match_pattern(rule.pattern, rule.has_host, parts.netloc, parts.path or "/")
            if found is None:
                continue
            headers = [pair for pair in headers if pair[0] not in rule.removed]
            for name, value in rule.added:
                filled = _filled(value, found)
                before = next((text for key, text in headers if key == name), None) if name in said else None
                headers = [pair for pair in headers if pair[0] != name]
                headers.append((name, filled if before is None else f"{before}, {filled}"))
                said.add(name)
        return headers


def _redirects_of(lines: Lines, complain: Complain) -> Iterable[RedirectRule]:
    count = 0
    for number, line in lines:
        words = line.split()
        if len(words) not in (2, 3):
            complain(number, "is not: SOURCE DESTINATION [CODE]")
            continue
        code = int(words[2]) if len(words) == 3 and words[2].isdigit() else 302 if len(words) == 2 else 0
        compiled = compiled_pattern(words[0])
        if code not in CODES:
            complain(number, f"has the code {words[2]!r}; known are {', '.join(map(str, CODES))}")
        elif compiled is None or "://" in words[0]:
            complain(number, "begins with no path")
        elif not words[1].startswith(("/", "https://", "http://")) or (code == 200 and not words[1].startswith("/")):
            complain(number, "leads neither to a path nor to a URL")
        elif (count := count + 1) > MAX_REDIRECTS:
            complain(number, f"is beyond the {MAX_REDIRECTS} redirects that count")
        else:
            yield RedirectRule(*compiled, encoded(words[1]), code)


def _header_rules_of(lines: Lines, complain: Complain) -> Iterable[HeaderRule]:
    compiled: tuple[re.Pattern[str], bool] | None = None
    added: list[tuple[str, str]] = []
    removed: list[str] = []
    rules: list[HeaderRule] = []

    def finish() -> None:
        if compiled is not None and (added or removed) and len(rules) < MAX_HEADER_RULES:
            rules.append(HeaderRule(*compiled, tuple(added), tuple(removed)))

    for number, line in lines:
        if not line[0].isspace():
            finish()
            compiled, added, removed = compiled_pattern(line.strip()), [], []
            if compiled is None:
                complain(number, "begins with no path and no URL")
            continue
        text = line.strip()
        name, colon, value = text.partition(":")
        if text.startswith("!"):
            removed.append(text[1:].strip().lower())
        elif not colon or not _HEADER_NAME.match(name.strip()) or not value.strip().isprintable():
            complain(number, "is not: NAME: VALUE")
        else:
            added.append((name.strip().lower(), value.strip()))
    finish()
    return rules


def _read(path: Path, parse: Callable[[Lines, Complain], Iterable[Rule]]) -> list[Rule]:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES).decode(errors="replace")
    except (FileNotFoundError, IsADirectoryError):
        return []

    def complain(number: int, why: str) -> None:
        log.warning("%s, line %d is ignored: it %s", path.name, number, why)

    lines = [(number, line.rstrip()) for number, line in enumerate(text.splitlines(), 1)]
    said = [(number, line) for number, line in lines if line.strip() and not line.lstrip().startswith("#")]
    return list(parse([(number, line) for number, line in said if len(line) <= MAX_LINE], complain))


def compiled_pattern(source: str) -> tuple[re.Pattern[str], bool] | None:
    """Compile the pattern of a path, or of a host and a path; return None if it is invalid.
    Only one placeholder per path part and one splat in all are allowed, because other patterns could take unbounded time to match."""
    has_host = source.startswith("https://")
    source = encoded(source.removeprefix("https://"))
    if not has_host and not source.startswith("/"):
        return None
    pattern, names = "", set[str]()
    for number, part in enumerate(source.split("/")):
        found = list(_PLACEHOLDER.finditer(part))
        in_host = has_host and number == 0
        if len(found) > 1 or (found and (name := found[0][1] or "splat") in names):
            return None
        pattern += "/" if number else ""
        if not found:
            pattern += re.escape(part)
            continue
        names.add(name)
        body = ".*" if found[0][1] is None and not in_host else "[^/]*" if in_host else "[^/]+"
        pattern += f"{re.escape(part[: found[0].start()])}(?P<{name}>{body}){re.escape(part[found[0].end() :])}"
    return re.compile(pattern), has_host


def encoded(address: str) -> str:
    """Percent-encode the characters that a URL must not contain; leave encoded ones as they are."""
    return quote(address, safe="%/:?#[]@!$&'()*+,;=-._~")


def match_pattern(pattern: re.Pattern[str], has_host: bool, host: str, path: str) -> dict[str, str] | None:
    found = pattern.fullmatch(host + path if has_host else path)
    return None if found is None else found.groupdict()


def _filled(text: str, values: dict[str, str]) -> str:
    return re.sub(r":([A-Za-z]\w*)", lambda found: values.get(found[1], found[0]), text)
