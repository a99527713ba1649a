"""`pilotlight types`: the bindings of a manifest as a class with annotations, for editors and type checkers."""

from pathlib import Path
from typing import Any

from pilotlight.functions.manifest import load_manifest

FACES = {  # where a function imports them from
    "ai": "ai.AI",
    "kv": "kv.KVNamespace",
    "d1": "d1.D1Database",
    "r2": "r2.R2Bucket",
    "queue_producer": "queues.Queue",
    "rate_limit": "rate_limit.RateLimit",
    "assets": "service.Fetcher",
    "service": "service.Service",
    "durable_object": "durable_objects.DurableObjectNamespace",
    "workflow": "workflow.Workflow",
    "worker_loader": "worker_loader.WorkerLoader",
    "analytics_engine": "small.AnalyticsEngine",
    "vectorize": "vectorize.Vectorize",
    "secrets_store": "small.StoredSecret",
    "hyperdrive": "small.Hyperdrive",
}
VALUES = (bool, int, float, str, dict, list)


def types(directory: Path, environment: str | None) -> str:
    """Return the source of a module with a class `Env`. Raises ManifestError."""
    imports, lines = {"from typing import Any"}, []
    for binding in sorted(load_manifest(directory, environment).bindings, key=lambda each: each.name):
        face = FACES.get(binding.kind)
        if face is not None:
            module, _, kind = face.partition(".")
            imports.add(f"from workers.bindings.{module} import {kind}")
        else:
            kind = _kind_of(binding.options.get("value"))
        lines.append(f"    {binding.name}: {kind}")
    body = "\n".join(lines) or "    pass"
    return (
        '"""Made by `pilotlight types`: what `self.env` is."""\n\n'
        + "\n".join(sorted(imports))
        + f"\n\n\nclass Env:\n{body}\n"
    )


def _kind_of(value: Any) -> str:
    return next((kind.__name__ for kind in VALUES if type(value) is kind), "Any")
