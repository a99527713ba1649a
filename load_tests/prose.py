"""`python -m load_tests.prose`: find sentences that must be read twice, in docstrings, comments, messages, help texts and Markdown.

Prints a count for each pattern and package, and exits with 1 if a package has more than its budget, which only falls. `--list PACKAGE` names the
places, `--sample N` draws N places to be read cold (regular expressions find about two of three such sentences), `--tree` measures another checkout.
"""

import argparse
import ast
import io
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "dialects", "edge_router", "engine", "functions", "kernels", "load_tests", "page", "response_store", "runtime", "sites",
    "support", "tests", "wire",
)  # fmt: skip
PAGES = ("*.md", "docs/*.md", "docs/measurements/*.md", "*/README.md", "*/*/README.md", "*/*/*/README.md")
LONGEST_SUMMARY = 100  # characters in a docstring's first line
EXAMPLES = ("load_tests/prose.py", "tests/load_tests/test_prose.py")  # these contain the patterns themselves
DATA = "# data"  # a comment after texts of models' prompts and corpora, which are not prose

_BE = "is|are|was|were|has|have|had|does|can|may|must|it|they"
_DO = (
    "comes?|came|waits?|asks?|asked|wants?|needs?|goes|went|sends?|reads?|keeps?|holds?|says?|begins?|began|stands?|lies?|gives?|gave|takes?"
    "|took|leaves?|left"
)
# The name of each pattern, with an example and its replacement.
PATTERNS: dict[str, re.Pattern[str]] = {
    # "Who waits is told so" -> "Waiting requests get a response"
    "headless clause": re.compile(
        rf"(^|[.:;,(] |\b(of|for|to|by|from|with|than|and|but) )(who|whoever|what|whatever) ({_BE}|{_DO})\b", re.IGNORECASE
    ),
    # "the client is told" -> "the client gets an error"
    "told, says": re.compile(r"\b(told|tells?(?! whether| me)|(is|was|are) said|says (who|what|when|where|so|it))\b", re.IGNORECASE),
    # "what stands behind" -> "after"; "begun" -> "started"
    "behind, begun": re.compile(
        r"\b(begun|behind (it|them|that|this|those|the|a|an|what|each|one)|stands? (there|here|in|at|by|behind|beside|for)"
        r"|lies? (in|at|there|here|beside)|goes on|go on|went on)\b",
        re.IGNORECASE,
    ),
    # "somebody else's is none" -> "raises 404 if it belongs to another account"
    "elliptical genitive": re.compile(
        r"\b(of (its|their|his|one's) own\b|(?<!there )(is|are) (?-i:none)\b|else's\b|an owner's\b|nobody's\b|theirs\b)", re.IGNORECASE
    ),
    # "; none: it is unknown" -> "; None if it is unknown"
    "None: as grammar": re.compile(r"(^|[.;,(] )[Nn]one: "),
    # "is to go on" -> "continues"
    "modal prophecy": re.compile(
        r"\b((is|are|was|were) to (be|go|have|come|do|get|take|wait|say|run|end|keep|give|make|serve|stop|sleep|answer)|had better)\b"
    ),
    # words that the field does not use for clients and processes
    "nobody, whoever": re.compile(r"\b(nobody|somebody|whoever|whomever|anybody|everybody)\b", re.IGNORECASE),
    # "what came of it" -> "the result"; "for good" -> "permanently"
    "comes of it": re.compile(
        r"\b(comes? of (it|them|that|this)|came of (it|them|that)|becomes? of|became of|as ever|for good|in the place of)\b", re.IGNORECASE
    ),
}  # fmt: skip
# First words that make a sentence without a subject: prepositions, relative pronouns and conjunctions.
FRAGMENT = re.compile(
    r"(about|above|after|afterwards|against|also|although|among|as|at|because|before|behind|below|beside|between|beyond|but|by|during"
    r"|except|for|from|how|if|in|inside|instead|into|near|not|of|on|or|over|per|since|so|such|than|that|then|there|these|those|though"
    r"|through|till|to|towards|under|unless|until|upon|what|whatever|when|whenever|where|wherever|whether|which|whichever|while|who"
    r"|whoever|whom|whose|why|with|within|without)\b",
    re.IGNORECASE,
)


class Place(NamedTuple):
    """A piece of prose in the source."""

    file: str
    line: int
    kind: str  # docstring, comment, message or page
    text: str


class Finding(NamedTuple):
    """A place where a pattern was found."""

    pattern: str
    place: Place


def prose(package: str, root: Path = ROOT) -> Iterator[Place]:
    """Yield the docstrings, comments and messages of a package, without the files of EXAMPLES."""
    for path in sorted((root / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        file, lines = path.relative_to(root).as_posix(), text.splitlines()
        if file not in EXAMPLES:
            found = _docstrings_and_messages(file, ast.parse(text))
            yield from (place for place in found if not lines[place.line - 1].endswith(DATA))
            yield from _comments(file, text)


def pages(root: Path = ROOT) -> Iterator[Place]:
    """Yield the paragraphs of the Markdown pages, without code and tables of figures."""
    for pattern in PAGES:
        for path in sorted(root.glob(pattern)):
            if path.relative_to(root).parts[0] not in ("build", "pilotlight", ".venv"):
                text = re.sub(
                    r"```.*?```|<!-- measured.*?<!-- end",
                    lambda found: "\n" * found[0].count("\n"),
                    path.read_text(encoding="utf-8"),
                    flags=re.DOTALL,
                )
                for number, line in enumerate(text.splitlines(), 1):
                    if line.strip():
                        yield Place(
                            path.relative_to(root).as_posix(),
                            number,
                            "page",
                            re.sub(r"`[^`]*`", "`x`", line.strip(" |-*#")),
                        )


def _docstrings_and_messages(file: str, tree: ast.Module) -> Iterator[Place]:
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                docstrings.add(id(first.value))
                yield Place(file, first.lineno, "docstring", first.value.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            docstrings.update(id(part) for part in node.values)
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            if _is_sentence(text):
                yield Place(file, node.lineno, "message", text)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and _is_sentence(node.value)
        ):
            yield Place(file, node.lineno, "message", node.value)


def _is_sentence(text: str) -> bool:
    """Tell whether a string is a message: several words on one line, and not a question, which is a prompt."""
    return (
        not text.rstrip().endswith("?")
        and "\n" not in text.strip()
        and len(re.findall(r"[a-z]{2,}", text)) >= 4
        and text.count(" ") >= 4
    )


def _comments(file: str, text: str) -> Iterator[Place]:
    """Yield each comment; lines of comment below each other are one."""
    found: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if found and not (_is_alone(token) and _is_alone(found[0]) and token.start[0] == found[-1].start[0] + 1):
                yield _comment(file, found)
                found = []
            found.append(token)
    if found:
        yield _comment(file, found)


def _is_alone(comment: tokenize.TokenInfo) -> bool:
    return not comment.line[: comment.start[1]].strip()


def _comment(file: str, lines: list[tokenize.TokenInfo]) -> Place:
    return Place(file, lines[0].start[0], "comment", " ".join(line.string.lstrip("# ") for line in lines))


def findings(places: Iterator[Place]) -> Iterator[Finding]:
    for place in places:
        text = " ".join(place.text.split())
        for name, pattern in PATTERNS.items():
            yield from (Finding(name, place) for _ in pattern.finditer(text))
        if place.kind == "docstring" and place.text.strip():
            summary = place.text.strip().partition("\n")[0]
            if FRAGMENT.match(summary):
                yield Finding("fragment", place)
            if len(summary) > LONGEST_SUMMARY and not place.file.startswith("tests/"):
                yield Finding("long summary", place)


def counts(root: Path = ROOT) -> dict[str, Counter[str]]:
    """Count the findings of each package, and of the Markdown pages, by pattern."""
    found = {package: Counter(one.pattern for one in findings(prose(package, root))) for package in PACKAGES}
    return {**found, "Markdown": Counter(one.pattern for one in findings(pages(root)))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout to measure")
    parser.add_argument("--list", metavar="PACKAGE", help="name the places of a package, or of Markdown")
    parser.add_argument("--sample", type=int, metavar="N", help="draw places at random")
    arguments = parser.parse_args()
    if arguments.list:
        places = pages() if arguments.list == "Markdown" else prose(arguments.list)
        for pattern, place in findings(places):
            print(f"{place.file}:{place.line} [{pattern}] {' '.join(place.text.split())[:160]}")
        return 0
    if arguments.sample:
        drawn = random.sample([place for package in PACKAGES for place in prose(package)], arguments.sample)
        for place in drawn:
            print(f"{place.file}:{place.line} [{place.kind}]\n    {' '.join(place.text.split())}")
        return 0
    found = counts(arguments.tree.resolve())
    for package, count in found.items():
        total = sum(count.values())
        worse = "  <-- more than its budget" if total > BUDGET[package] else ""
        print(f"{package:<16} {total:>5}  at most {BUDGET[package]}{worse}   {dict(count.most_common())}")
    print(f"{'all':<16} {sum(sum(count.values()) for count in found.values()):>5}")
    return any(sum(count.values()) > BUDGET[package] for package, count in found.items())


# How many findings each package may have. Figures only fall.
BUDGET = {
    "dialects": 0,
    "edge_router": 0,
    "engine": 0,
    "functions": 0,
    "kernels": 0,
    "load_tests": 0,
    "page": 0,
    "response_store": 0,
    "runtime": 0,
    "sites": 0,
    "support": 0,
    "tests": 0,
    "wire": 0,
    "Markdown": 0,
}

if __name__ == "__main__":
    sys.exit(main())
