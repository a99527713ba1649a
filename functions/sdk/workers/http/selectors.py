"""CSS selectors of HTMLRewriter: tags, ids, classes, attributes, pseudo-classes, combinators.

The pseudo-classes are `:not()`, `:first-child` and `:nth-child(N)`; the combinators are descendant and child. See
https://developers.cloudflare.com/workers/runtime-apis/html-rewriter/#selectors. An element is matched at its start tag, so a selector cannot depend
on what follows it.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

_NAME = r"(?:[\w-]|[^\x00-\x7f]|\\.)+"
_PART = re.compile(
    rf"""(?P<tag>\*|{_NAME}) | \#(?P<id>{_NAME}) | \.(?P<cls>{_NAME})
    | \[\s*(?P<attribute>{_NAME})\s*(?:(?P<operator>[~|^$*]?=)\s*(?P<value>"[^"]*"|'[^']*'|{_NAME})\s*(?P<flag>[is])?\s*)?\]
    | :not\((?P<negated>[^()]*)\) | :(?P<first>first-child) | :nth-child\(\s*(?P<nth>\d+)\s*\)""",
    re.VERBOSE | re.IGNORECASE,
)


class SelectableElement(Protocol):
    """The part of an element that selectors use."""

    @property
    def tag(self) -> str: ...
    @property
    def position(self) -> int:
        """The element's position among its siblings, from 1."""

    def attribute(self, name: str) -> str | None: ...


Test = Callable[[SelectableElement], bool]


class Step(NamedTuple):
    is_child: bool  # whether it must be a child of the previous step's element, not just a descendant
    tests: tuple[Test, ...]

    def matches(self, element: SelectableElement) -> bool:
        return all(test(element) for test in self.tests)


class Selector:
    """One selector, or several separated by commas. Raises ValueError if it is invalid."""

    def __init__(self, text: str) -> None:
        self._alternatives = [_steps(each.strip(), text) for each in re.split(r",(?![^\[]*\])(?![^(]*\))", text)]

    def matches(self, path: Sequence[SelectableElement]) -> bool:
        """Tell whether the selector matches the last element of a path that starts at the root."""
        return any(_matches(steps, path) for steps in self._alternatives)


def _matches(steps: Sequence[Step], path: Sequence[SelectableElement]) -> bool:
    if not path or not steps[-1].matches(path[-1]):
        return False
    if len(steps) == 1:
        return True
    if steps[-1].is_child:
        return _matches(steps[:-1], path[:-1])
    return any(_matches(steps[:-1], path[:end]) for end in range(len(path) - 1, 0, -1))


def _steps(text: str, whole: str) -> list[Step]:
    steps: list[Step] = []
    is_child, at = False, 0
    while at < len(text):
        tests, start = [], at
        while (found := _PART.match(text, at)) is not None and (found["tag"] is None or at == start):
            tests.append(_test(found, whole))
            at = found.end()
        if not tests:
            raise ValueError(f"HTMLRewriter cannot select by {whole!r}; see {text[at : at + 20]!r}")
        steps.append(Step(is_child, tuple(tests)))
        gap = re.compile(r"\s*(>?)\s*").match(text, at)
        assert gap is not None
        if gap.end() == at and at < len(text):
            raise ValueError(f"HTMLRewriter cannot select by {whole!r}; see {text[at : at + 20]!r}")
        is_child, at = gap[1] == ">", gap.end()
    if not steps:
        raise ValueError(f"HTMLRewriter cannot select by {whole!r}: a selector is missing")
    return steps


def _test(found: "re.Match[str]", whole: str) -> Test:
    if (tag := found["tag"]) is not None:
        return (lambda element: True) if tag == "*" else (lambda element: element.tag == tag.lower())
    if found["id"] is not None:
        return lambda element: element.attribute("id") == found["id"]
    if found["cls"] is not None:
        return lambda element: found["cls"] in (element.attribute("class") or "").split()
    if found["negated"] is not None:
        steps = _steps(found["negated"].strip(), whole)
        return lambda element: not steps[-1].matches(element)
    if found["first"] is not None:
        return lambda element: element.position == 1
    if found["nth"] is not None:
        return lambda element: element.position == int(found["nth"])
    return _attribute_test(found["attribute"], found["operator"], found["value"], (found["flag"] or "").lower() == "i")


def _attribute_test(name: str, operator: str | None, quoted: str | None, folds: bool) -> Test:
    if operator is None or quoted is None:
        return lambda element: element.attribute(name) is not None
    value = quoted[1:-1] if quoted[:1] in "\"'" else quoted
    value = value.lower() if folds else value
    compare: dict[str, Callable[[str], bool]] = {
        "=": lambda actual: actual == value,
        "~=": lambda actual: value in actual.split(),
        "|=": lambda actual: actual == value or actual.startswith(f"{value}-"),
        "^=": lambda actual: bool(value) and actual.startswith(value),
        "$=": lambda actual: bool(value) and actual.endswith(value),
        "*=": lambda actual: bool(value) and value in actual,
    }

    def test(element: SelectableElement) -> bool:
        actual = element.attribute(name)
        return actual is not None and compare[operator](actual.lower() if folds else actual)

    return test
