"""`make docs`: build the documentation site (build/docs); fail for any warning.

Warnings are broken links, missing pages and pages that nothing links to. Copies every page of zensical.toml to build/docs-source, with its path in
the repository, so that links between pages work in both; then copies the files that pages link to. A link to a folder is replaced by its text.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "zensical.toml"
SOURCE = ROOT / "build" / "docs-source"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def main() -> int:
    shutil.rmtree(SOURCE, ignore_errors=True)
    for page in pages():
        copy(page)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(CONFIG)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def pages() -> list[str]:
    """List the pages of the navigation, as paths from the repository's root."""
    config = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    return list(_named(config["project"]["nav"]))


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(part)


def copy(page: str) -> None:
    """Copy a page, and the files that it links to unless they are pages themselves."""
    file = ROOT / page
    target = SOURCE / page
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(LINK.sub(lambda found: _link(found, file), file.read_text(encoding="utf-8")), encoding="utf-8")


def _link(found: re.Match[str], file: Path) -> str:
    """Return a link for the site: a link to a folder becomes plain text; a linked file is copied."""
    _, text, path, _ = found.groups()
    linked = (file.parent / path).resolve()
    if "://" in path or not linked.is_relative_to(ROOT):
        return found[0]
    if linked.is_dir():
        return text
    if linked.suffix != ".md" and linked.is_file():
        target = SOURCE / linked.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(linked, target)
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
