"""`pilotlight init`: write a folder with a manifest, a first function and its tests, from a template.

Existing files are never overwritten."""

import re
import shlex
from importlib.resources import as_file, files
from pathlib import Path

import msgspec

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.wire.hop.deployments import Name

TEMPLATES = files("pilotlight.functions") / "templates"
MANIFEST = "wrangler.toml"
SUFFIX = ".txt"  # ending of Python files in a template, so that they are not modules of this package
IGNORED = ".pilotlight/\n.dev.vars*\n.env*\n__pycache__/\n"


def init(directory: Path, name: str | None, template: str = "hello") -> None:
    """Write the files of a template.

    Raises CliError for an invalid function name, an unknown template, or an existing file."""
    chosen = name or re.sub(r"[^a-z0-9_-]+", "-", directory.resolve().name.lower())[:63].strip("-_") or "function"
    try:
        msgspec.convert(chosen, Name)
    except msgspec.ValidationError:
        sentence = (
            "a function's name has small letters, digits, - and _, begins with a letter or a digit, and has at most 63"
        )
        raise CliError(f"--name {chosen!r}: {sentence}.") from None
    files = {".gitignore": IGNORED, **_files_of(template, chosen)}
    taken = [file for file in files if (directory / file).exists()]
    if taken:
        raise CliError(f"{directory / taken[0]} is there already; choose another folder.")
    for file, text in files.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    folder = shlex.quote(str(directory))
    following = f"pilotlight dev {folder}, or pytest {folder} for its tests"
    print(f"Made {chosen} in {directory}. Next: {following}")


def template_names() -> list[str]:
    return sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir())


def _files_of(template: str, name: str) -> dict[str, str]:
    """Return the texts of a template by their paths in the new folder. Raises CliError."""
    if template not in template_names():
        raise CliError(f"There is no template {template!r}; there are {', '.join(template_names())}.")
    with as_file(TEMPLATES / template) as folder:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        texts = {path.relative_to(folder).as_posix().removesuffix(SUFFIX): path.read_text("utf-8") for path in paths}
    return {**texts, MANIFEST: texts[MANIFEST].replace("{name}", name)}
