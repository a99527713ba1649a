"""Owners: which function a store, a queue, a service or an object's class belongs to. Another function that names it is refused, unless the site file
shares it (`functions.shared`).

A service and the classes of Durable Objects are the function's that has them; anything else belongs to the first function that binds it, which is
written beside its data and stays when the function goes.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from runtime.bindings.binding import BindingError
from runtime.bindings.place import directory_of
from runtime.functions.manifest import Manifest

OF_A_FUNCTION = ("service", "durable_object", "props")  # what is named by its function


class Owners:
    def __init__(self, state_dir: Path, shared: Mapping[str, Collection[str]]) -> None:
        """`shared`: by KIND:ID, patterns of the functions that may use it beside its owner."""
        self._state_dir = state_dir
        self._shared = shared

    def claim(self, manifest: Manifest) -> None:
        """All that a function names. Raises BindingError, whose sentence says whose it is and how it is shared."""
        for kind, id in dict.fromkeys(_named(manifest)):
            owner = id if kind in OF_A_FUNCTION else self._owner(kind, id, manifest.name)
            allowed = self._shared.get(f"{kind}:{id}", ())
            if owner != manifest.name and not any(fnmatchcase(manifest.name, pattern) for pattern in allowed):
                raise BindingError(
                    f"{manifest.name} may not use {kind}:{id}, which is the function {owner}'s; "
                    f'the site file shares it by functions.shared = {{ "{kind}:{id}" = ["{manifest.name}"] }}'
                )

    def _owner(self, kind: str, id: str, function: str) -> str:
        """From now on this function, where there was none."""
        file = directory_of(self._state_dir, kind, id) / "owner"
        with suppress(FileNotFoundError):
            if owner := file.read_text(encoding="utf-8"):  # else it was being written when the machine stopped
                return owner
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(function, encoding="utf-8")
        return function


def _named(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for binding in manifest.bindings:
        options, name = binding.options, binding.name
        if binding.kind == "kv":
            yield "kv", options.get("id") or name
        elif binding.kind == "d1":
            yield "d1", options.get("database_id") or options.get("database_name") or name
        elif binding.kind == "r2":
            yield "r2", options.get("bucket_name") or name
        elif binding.kind == "queue_producer":
            yield "queue", options["queue"]
        elif binding.kind == "rate_limit" and options.get("namespace_id"):
            yield "rate_limit", options["namespace_id"]
        elif binding.kind == "durable_object" and options.get("script_name"):
            yield "durable_object", options["script_name"]
        elif binding.kind == "service" and not options["service"].startswith("@"):  # else a model
            yield "service", options["service"]
            if options.get("props"):  # which the function that is called believes
                yield "props", options["service"]
    for consumer in manifest.consumers:
        yield "queue", consumer.queue
        if consumer.dead_letter_queue:
            yield "queue", consumer.dead_letter_queue
