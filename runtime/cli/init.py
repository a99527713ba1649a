"""`pilotlight init`: a folder with a manifest and a first function. Writes nothing over what is there."""

import re
import shlex
from pathlib import Path

import msgspec
from rich.console import Console

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.wire.hop.deployments import Name

MANIFEST = """\
name = "{name}"
main = "src/entry.py"
compatibility_date = "2026-01-01"
compatibility_flags = ["python_workers"]

[vars]
GREETING = "Hello"

[ai]
binding = "AI"
"""
ENTRY = """\
from workers import Response, WorkerEntrypoint


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(f"{self.env.GREETING} from {request.url}\\n")
"""
IGNORED = ".pilotlight/\n.dev.vars*\n.env*\n__pycache__/\n"


def init(directory: Path, name: str | None) -> None:
    """Raises CliError for a name that no function may have, and where there is one already."""
    chosen = name or re.sub(r"[^a-z0-9_-]+", "-", directory.resolve().name.lower())[:63].strip("-_") or "function"
    try:
        msgspec.convert(chosen, Name)
    except msgspec.ValidationError:
        sentence = (
            "a function's name has small letters, digits, - and _, begins with a letter or a digit, and has at most 63"
        )
        raise CliError(f"--name {chosen!r}: {sentence}.") from None
    files = {"wrangler.toml": MANIFEST.format(name=chosen), "src/entry.py": ENTRY, ".gitignore": IGNORED}
    taken = [file for file in files if (directory / file).exists()]
    if taken:
        raise CliError(f"{directory / taken[0]} is there already; choose another folder.")
    for file, text in files.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    following = f"pilotlight dev {shlex.quote(str(directory))}"
    Console().print(f"Made {chosen} in {directory}. Next: {following}", highlight=False, markup=False, soft_wrap=True)
