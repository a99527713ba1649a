"""`pilotlight types`: write a manifest's bindings as an annotated class, for type checkers."""

import sys
from pathlib import Path
from typing import Any

from pilotlight.functions.manifest import load_manifest

SDK = Path(__file__).parents[1] / "sdk"
VALUES = (bool, int, float, str, dict, list)


def types(directory: Path, environment: str | None) -> str:
    """Return the source of a module with the class `Env`. Raises ManifestError."""
    imports, lines = {"from typing import Any"}, []
    faces = _faces()
    for binding in sorted(load_manifest(directory, environment).bindings, key=lambda each: each.name):
        face = faces.get(binding.kind)
        if face is not None:
            kind = face.__name__
            imports.add(f"from {face.__module__} import {kind}")
        else:
            kind = _kind_of(binding.options.get("value"))
        lines.append(f"    {binding.name}: {kind}")
    body = "\n".join(lines) or "    pass"
    return (
        '"""Made by `pilotlight types`: what `self.env` is."""\n\n'
        + "\n".join(sorted(imports))
        + f"\n\n\nclass Env:\n{body}\n"
    )


def _faces() -> dict[str, type[Any]]:
    """Return the SDK classes of bindings by kind, for the kinds that are offered here."""
    if str(SDK) not in sys.path:
        sys.path.insert(0, str(SDK))
    from workers.bindings import FACES

    return {kind: face for kind, face in FACES.items() if kind != "not_offered"}


def _kind_of(value: Any) -> str:
    return next((kind.__name__ for kind in VALUES if type(value) is kind), "Any")
