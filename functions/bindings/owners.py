"""Ownership of stores, queues, services and Durable Object classes.

All functions of the site file share one owner, the site; each deployed function is a separate owner. A function may not use what another owner has,
unless the site file shares it (`functions.shared`).

A service or a Durable Object class belongs to the owner of its function. Any other resource belongs to the first owner that is served with it; this
is recorded beside the data and outlives the function.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from pilotlight.functions.bindings.binding import BindingError
from pilotlight.functions.bindings.place import directory_of, name_of
from pilotlight.functions.manifest import BindingDeclaration, Manifest

SITE = "@site"  # no function has this name

UNNAMED = {  # options that name a store, by the binding's kind
    "kv": ("id",), "d1": ("database_id", "database_name"), "r2": ("bucket_name",), "analytics_engine": ("dataset",),
}  # fmt: skip

OF_A_FUNCTION = ("service", "durable_object", "props")  # kinds whose id is the name of a function


class Owners:
    def __init__(self, state_dir: Path, own: Collection[str], shared: Mapping[str, Collection[str]]) -> None:
        """`own` are the functions of the site file.
        `shared` maps KIND:ID to patterns of the functions that may use it besides its owner."""
        self._state_dir = state_dir
        self._own = own
        self._shared = shared

    def check(self, manifest: Manifest) -> None:
        """Check that the function may use all resources that its manifest names.
        Raises BindingError, which names the resource's owner and the setting that would share it."""
        asker = self._of(manifest.name)
        for kind, id in _named(manifest):
            if kind in OF_A_FUNCTION and asker == SITE:  # the operator decides what functions of the site file may call
                continue
            owner = self._of(id) if kind in OF_A_FUNCTION else _read(self._file(kind, id)) or asker
            allowed = self._shared.get(f"{kind}:{id}", ())
            if owner != asker and not any(fnmatchcase(manifest.name, pattern) for pattern in allowed):
                whose = "the site's" if owner == SITE else f"the function {owner}'s"
                raise BindingError(
                    f"{manifest.name} may not use {kind}:{id}, which is {whose}; "
                    f'the site file shares it by functions.shared = {{ "{kind}:{id}" = ["{manifest.name}"] }}'
                )

    def claim(self, manifest: Manifest) -> None:
        """Make the function the owner of those resources that have no owner. Raises as `check` does.
        Call this only once the function is served, so that a refused version claims nothing."""
        self.check(manifest)
        for kind, id in _named(manifest):
            file = self._file(kind, id)
            if kind not in OF_A_FUNCTION and not _read(file):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(self._of(manifest.name), encoding="utf-8")

    def _of(self, function: str) -> str:
        return SITE if function in self._own else function

    def _file(self, kind: str, id: str) -> Path:
        return directory_of(self._state_dir, kind, id) / "owner"


def _read(file: Path) -> str:
    """Return the owner in a file; empty if there is none, or if the machine crashed while it was written."""
    with suppress(FileNotFoundError):
        return file.read_text(encoding="utf-8")
    return ""


def store_of(binding: BindingDeclaration) -> tuple[str, str] | None:
    """Return the kind and the id of the store or queue that a binding declares; None if it declares none."""
    options, name = binding.options, binding.name
    ids = {
        "kv": options.get("id") or name,
        "d1": options.get("database_id") or options.get("database_name") or name,
        "r2": options.get("bucket_name") or name,
        "queue_producer": options.get("queue"),
        "rate_limit": options.get("namespace_id"),
        "vectorize": options.get("index_name"),
        "analytics_engine": options.get("dataset") or name,
        "secrets_store": options.get("store_id"),
    }
    id = ids.get(binding.kind)
    return (folder_of(binding.kind), id) if id else None


def folder_of(kind: str) -> str:
    """Return the kind by which the stores of a kind of bindings are known."""
    return "queue" if kind == "queue_producer" else kind


def id_in(folder: Path) -> str:
    """Return the id of the store in a folder.
    It is FUNCTION/BINDING if the folder was named so, otherwise the folder's name."""
    owner = _read(folder / "owner")
    own = f"{owner}/{folder.name.partition('.')[0].removeprefix(f'{owner}-')}"
    return own if name_of(own) == folder.name else folder.name


def with_own_stores(manifest: Manifest) -> Manifest:
    """Name each unnamed store of a deployed function FUNCTION/BINDING, so that no other function has it."""
    bindings = []
    for binding in manifest.bindings:
        names = UNNAMED.get(binding.kind, ())
        if names and not any(binding.options.get(name) for name in names):
            binding = binding._replace(options={**binding.options, names[0]: f"{manifest.name}/{binding.name}"})
        bindings.append(binding)
    return replace(manifest, bindings=tuple(bindings))


def _named(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for binding in manifest.bindings:
        options = binding.options
        if (store := store_of(binding)) is not None:
            yield store
        elif binding.kind in ("durable_object", "workflow") and options.get("script_name"):
            yield "durable_object", options["script_name"]
        elif binding.kind == "service" and not options["service"].startswith("@"):
            yield "service", options["service"]
            if options.get("props"):  # the called function trusts its callers' props
                yield "props", options["service"]
    for service in manifest.tail_consumers:
        yield "service", service
    for consumer in manifest.consumers:
        yield "queue", consumer.queue
        if consumer.dead_letter_queue:
            yield "queue", consumer.dead_letter_queue
