"""The pages are correct: the paths in them exist, they stay below their size limits, and the table of tests/README.md matches pytest's collection."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.table import BEGIN, END, README, ROOT, render, replaced

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "*/README.md", "*/*/README.md", "*/*/*/README.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md" and not path.relative_to(ROOT).parts[0].startswith((".", "build", "pilotlight"))
)
LARGEST = {"README.md": 10_000, "ARCHITECTURE.md": 12_000}  # bytes


def test_the_table_is_what_pytest_collects() -> None:
    text = README.read_text(encoding="utf-8")
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    assert text == replaced(text, render()), "the table is stale: run python -m tests.table"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = sources()
    places = ("", f"{page.parent.relative_to(ROOT).as_posix()}/")
    missing = [
        name
        for name in sorted(named_paths(text))
        if not any((ROOT / f"{place}{name}").exists() for place in places)
        and not ("/" not in name and any(file.endswith(f"/{name}") for file in files))
    ]
    missing += [link for link in sorted(linked_paths(text)) if not (page.parent / link).exists()]
    assert missing == []


@cache
def sources() -> list[str]:
    """List the files in the folders of this repository."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"]
    return [path.as_posix() for folder in folders for path in folder.rglob("*.*")]


def named_paths(text: str) -> set[str]:
    """Return the paths in backticks, without `::name`: folders of this repository, paths in them, and source files."""
    folders = "|".join(re.escape(path.name) for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._")
    in_folders = re.findall(rf"`((?:{folders})/[\w./-]*)(?:::[\w.]+)?`", text)
    files = re.findall(r"`([\w/-]+\.(?:py|c|h|toml))(?:::[\w.]+)?`", text)
    return {name for name in [*in_folders, *files] if not name.endswith("...")}


def linked_paths(text: str) -> set[str]:
    return {link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link}


@pytest.mark.parametrize("name", LARGEST)
def test_a_page_stays_short(name: str) -> None:
    assert (ROOT / name).stat().st_size < LARGEST[name]
