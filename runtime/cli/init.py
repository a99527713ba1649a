"""`pilotlight init`: a folder with a manifest and a first function. Writes nothing over what is there."""

import re
from pathlib import Path

from rich.console import Console

from runtime.cli.errors import CliError

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
IGNORED = ".pilotlight/\n.dev.vars*\n__pycache__/\n"


def init(directory: Path, name: str | None) -> None:
    chosen = name or re.sub(r"[^a-z0-9_-]+", "-", directory.resolve().name.lower()).strip("-_") or "function"
    files = {"wrangler.toml": MANIFEST.format(name=chosen), "src/entry.py": ENTRY, ".gitignore": IGNORED}
    taken = [file for file in files if (directory / file).exists()]
    if taken:
        raise CliError(f"{directory / taken[0]} is there already; choose another folder.")
    for file, text in files.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    Console().print(f"Made {chosen} in {directory}. Next: pilotlight dev {directory}", highlight=False, soft_wrap=True)
