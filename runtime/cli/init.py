"""`pilotlight init`: write a folder with a manifest, a first function and its tests, from a template.

Existing files are never overwritten; an existing .gitignore gets the lines that it lacks."""

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
GITIGNORE, IGNORED = ".gitignore", (".pilotlight/", ".dev.vars*", ".env*", "__pycache__/")


def init(directory: Path, name: str | None, template: str = "hello") -> None:
    """Write the files of a template.

    Raises CliError for an invalid function name, an unknown template, or an existing file."""
    chosen = name or re.sub(r"[^a-z0-9_-]+", "-", directory.resolve().name.lower())[:63].strip("-_") or "function"
    try:
        msgspec.convert(chosen, Name)
    except msgspec.ValidationError:
        sentence = (
            "a function's name has at most 63 small letters, digits, - and _, and begins with a letter or a digit"
        )
        raise CliError(f"--name {chosen!r}: {sentence}.") from None
    files = _files_of(template, chosen)
    taken = [file for file in files if (directory / file).exists()]
    if taken:
        raise CliError(f"{directory / taken[0]} is there already; choose another folder.")
    for file, text in {**files, GITIGNORE: _gitignore(directory / GITIGNORE)}.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    folder = shlex.quote(str(directory))
    following = f"pilotlight dev {folder}, or pytest {folder} for its tests"
    print(f"Made {chosen} in {directory}. Next: {following}")


def _gitignore(path: Path) -> str:
    present = path.read_text("utf-8").splitlines() if path.exists() else []
    return "".join(f"{line}\n" for line in (*present, *(each for each in IGNORED if each not in present)))


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
