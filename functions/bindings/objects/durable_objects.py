"""Durable Objects at the runtime: the binding that functions use, and the storage calls of objects.

All instances of objects live in the oldest process of their function's pool. An instance gets a number when it starts and sends it with each storage
call, so an instance that has been replaced can neither read nor write.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pilotlight.functions.bindings.assets.asset_files import FetchCall
from pilotlight.functions.bindings.binding import Binding, BindingError, Body, Functions, Services, method
from pilotlight.functions.bindings.objects.alarms import Alarms
from pilotlight.functions.bindings.objects.object_file import ObjectFile, StorageListing
from pilotlight.functions.bindings.objects.object_migrations import ObjectMigrations, move_alarms
from pilotlight.functions.bindings.objects.object_store import ClassGone, ObjectKey, ObjectStore, Stale
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.bindings.service_binding import RpcCall, called, fetched
from pilotlight.functions.bindings.storage.sql import SqlError
from pilotlight.functions.bindings.storage.wal_archive import HistoryError
from pilotlight.functions.channel.frames import UNNUMBERED, RpcEvent
from pilotlight.functions.manifest import BindingDeclaration, Manifest
from pilotlight.support.database import storage_word

STORAGE = "@objects"  # reserved: no binding of a manifest can have this name
MAX_KEYS = 128  # per call
MAX_KEY_BYTES = 2048
MAX_VALUE_BYTES = 2_000_000  # limit of a value together with its key
MAX_LIST_BYTES = 16 << 20
MAX_TIME_MS = 8_640_000_000_000_000

Id = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # \Z, because $ also matches before a final newline
ClassName = Annotated[str, Meta(pattern=r"^[A-Za-z_$][A-Za-z0-9_$]{0,127}\Z")]
T = TypeVar("T")


class FetchObject(FetchCall, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Id
    object_name: str | None = None


class RpcObject(RpcCall, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Id
    object_name: str | None = None


class DurableObjects(Binding):
    """The namespace binding `env.NAMESPACE`: calls objects of one class."""

    kind = "durable_object"

    def __init__(self, functions: Functions, function: str, class_name: str) -> None:
        self._functions = functions
        self._function = function
        self._class_name = class_name

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "DurableObjects":
        if services.functions is None:
            raise BindingError(f"{declaration.name}: the site has no functions whose objects could be bound")
        options = declaration.options
        return cls(services.functions, options.get("script_name") or services.function, options["class_name"])

    @method
    async def fetch(self, request: FetchObject, body: Body | None) -> Any:
        options = self._options(request.id, request.object_name)
        return await fetched(self._functions, self._function, self._class_name, request, body, options)

    @method
    async def rpc(self, request: RpcObject, body: Body | None) -> Any:
        options = self._options(request.id, request.object_name)
        return await called(self._functions, self._function, self._class_name, request, body, options)

    def _options(self, id: str, name: str | None) -> dict[str, Any]:
        return {"object": self._class_name, "id": id, "name": name}


class InstanceStarted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    class_name: ClassName
    id: Id


class InstanceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that all requests of an instance have."""

    class_name: ClassName
    id: Id
    instance: int


class StorageKeys(InstanceRequest, frozen=True, forbid_unknown_fields=True):
    keys: list[str]


class StoragePut(InstanceRequest, frozen=True, forbid_unknown_fields=True):
    entries: dict[str, Any]


class StorageList(InstanceRequest, frozen=True, forbid_unknown_fields=True):
    start: str | None = None
    start_after: str | None = None
    end: str | None = None
    prefix: str = ""
    reverse: bool = False
    limit: Annotated[int, Meta(ge=1)] | None = None


class StorageSql(InstanceRequest, frozen=True, forbid_unknown_fields=True):
    sql: str
    parameters: list[Any] = []


class EndTransaction(InstanceRequest, frozen=True, forbid_unknown_fields=True):
    keep: bool


class SetAlarm(InstanceRequest, frozen=True, forbid_unknown_fields=True):
    at_ms: Annotated[int, Meta(ge=0, le=MAX_TIME_MS)]


class BookmarkAt(InstanceRequest, frozen=True, forbid_unknown_fields=True):
    at_ms: Annotated[int, Meta(ge=0, le=MAX_TIME_MS)]


class RestoreNext(InstanceRequest, frozen=True, forbid_unknown_fields=True):
    bookmark: str


class ObjectStorage(Binding):
    """The binding for `ctx.storage` of all objects of a function."""

    kind = "storage"

    def __init__(self, store: ObjectStore, alarms: Alarms, migrations: ObjectMigrations) -> None:
        self._store = store
        self._alarms = alarms
        self._migrations = migrations

    @classmethod
    def of(cls, manifest: Manifest, state_dir: Path, services: Services) -> "ObjectStorage":
        """Open the storage of a function's objects for one version of the function.
        Raises MigrationError if the version does not fit the existing objects."""
        assert services.functions is not None
        directory, functions, function = _directory(state_dir, services), services.functions, services.function
        migrations = ObjectMigrations(directory, manifest.migrations, _own_classes(manifest))
        migrations.check()

        def make(path: Path) -> ObjectStore:
            store = ObjectStore(path, services.max_bytes, services.history_s)
            store.gone = _sentences(migrations.record().gone)
            return store

        store = services.databases.get(directory, make)

        async def ring(key: ObjectKey, called: str, args: list[Any]) -> None:
            options = {"object": key.class_name, "id": key.id, "name": None, "internal": True}
            await functions.ask(function, RpcEvent(UNNUMBERED, key.class_name, called, args, options=options))

        path = directory / "alarms.sqlite"
        alarms = services.databases.get(path, lambda path: Alarms(path, store, ring, services.clock))
        return cls(store, alarms, migrations)

    @property
    def moves(self) -> tuple[str, ...]:
        """The tags of pending migrations that rename or delete classes."""
        pending = self._migrations.pending
        return tuple(each.tag for each in pending if each.renamed_classes or each.deleted_classes)

    def migrate(self) -> None:
        """Start this version's pending migrations. Instances of renamed and deleted classes end."""
        pending, gone = self._migrations.pending, self._migrations.after().gone
        if not pending:
            return
        sources = {name for each in pending for name in each.deleted_classes}
        sources |= {renamed.from_ for each in pending for renamed in each.renamed_classes}
        targets = {renamed.to for each in pending for renamed in each.renamed_classes}
        self._store.gone = {name: why for name, why in self._store.gone.items() if name in gone}

        async def work() -> None:
            for migration in self._migrations.pending:
                await asyncio.to_thread(self._migrations.move, migration)
                await move_alarms(self._alarms, migration)
                await asyncio.to_thread(self._migrations.note, migration)

        self._store.move(sources | targets, _sentences(gone), work)

    @method
    async def start(self, request: InstanceStarted) -> int:
        return await self._guarded(
            lambda: self._store.start(ObjectKey(request.class_name, request.id), self._alarms.note)
        )

    @method
    async def get(self, request: StorageKeys) -> Any:
        keys = _checked(request.keys)
        return await self._run(request, lambda file: file.get(keys))

    @method
    async def put(self, request: StoragePut) -> None:
        _checked(list(request.entries))
        encoded = {key: msgspec.msgpack.encode(value) for key, value in request.entries.items()}
        for key, value in encoded.items():
            if len(key.encode()) + len(value) > MAX_VALUE_BYTES:
                sentence = (
                    f"the value of {key[:100]!r} has {len(value)} bytes; with its key it may have {MAX_VALUE_BYTES}"
                )
                raise BindingError(sentence, status=413, name="RangeError")
        await self._run(request, lambda file: file.put(encoded))

    @method
    async def delete(self, request: StorageKeys) -> int:
        keys = _checked(request.keys)
        return await self._run(request, lambda file: file.delete(keys))

    @method
    async def list(self, request: StorageList) -> Any:
        listing = StorageListing(
            request.start, request.start_after, request.end, request.prefix, request.reverse, request.limit
        )
        return await self._run(request, lambda file: file.listed(listing, MAX_LIST_BYTES))

    @method
    async def delete_all(self, request: InstanceRequest) -> None:
        await self._run(request, lambda file: file.delete_all())

    @method
    async def sql(self, request: StorageSql) -> Any:
        parameters = [_scalar(value) for value in request.parameters]
        outcome = await self._run(request, lambda file: file.sql(request.sql, parameters))
        return {
            "columns": list(outcome.columns),
            "rows": outcome.rows,
            "rows_read": outcome.rows_read,
            "rows_written": outcome.rows_written,
        }

    @method
    async def size(self, request: InstanceRequest) -> int:
        return await self._run(request, lambda file: file.size_bytes())

    @method
    async def current_bookmark(self, request: InstanceRequest) -> str:
        return await self._run(request, lambda file: file.current_bookmark())

    @method
    async def bookmark_at(self, request: BookmarkAt) -> str:
        return await self._run(request, lambda file: file.bookmark_at(request.at_ms / 1000))

    @method
    async def restore_next(self, request: RestoreNext) -> str:
        return await self._run(request, lambda file: file.restore_next(request.bookmark))

    @method
    async def begin(self, request: InstanceRequest) -> None:
        await self._run(request, lambda file: file.begin())

    @method
    async def end(self, request: EndTransaction) -> None:
        await self._run(request, lambda file: file.end(keep=request.keep))

    @method
    async def commit(self, request: InstanceRequest) -> None:
        await self._run(request, lambda file: file.commit())

    @method
    async def abandon(self, request: InstanceRequest) -> None:
        """End the instance at its own request and roll back its uncommitted writes."""
        key = ObjectKey(request.class_name, request.id)
        if self._store.is_current(key, request.instance):
            await self._guarded(lambda: self._store.reset(key))

    @method
    async def get_alarm(self, request: InstanceRequest) -> int | None:
        alarm = await self._run(request, lambda file: file.alarm())
        return None if alarm is None or alarm.is_running else alarm.at_ms

    @method
    async def set_alarm(self, request: SetAlarm) -> None:
        key = ObjectKey(request.class_name, request.id)
        await self._run(request, lambda file: file.set_alarm(request.at_ms))
        try:
            await self._guarded(lambda: self._alarms.note(key, request.at_ms))
        except BaseException:
            await self._store.reset(key)  # an alarm that is not in the list must not be committed
            raise

    @method
    async def delete_alarm(self, request: InstanceRequest) -> None:
        await self._run(request, lambda file: file.delete_alarm())

    async def _run(self, request: InstanceRequest, work: Callable[[ObjectFile], T]) -> T:
        key = ObjectKey(request.class_name, request.id)
        return await self._guarded(lambda: self._store.run(key, work, request.instance))

    async def _guarded(self, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await work()
        except ClassGone as error:
            raise BindingError(str(error), code="object_reset", status=500) from None
        except Stale:
            sentence = (
                "this instance of the Durable Object was replaced, or its storage failed, or a statement undid its open transaction (as INSERT OR "
                "ROLLBACK does); the next request starts it anew"
            )
            raise BindingError(sentence, code="object_reset", status=500) from None
        except SqlError as error:
            raise BindingError(str(error), code="SQLITE_ERROR") from None
        except HistoryError as error:
            raise BindingError(str(error), code="bad_bookmark") from None
        except Exception as error:
            if (word := storage_word(error)) is not None:
                raise BindingError(word[2], code=word[0], status=word[1]) from None
            if getattr(error, "sqlite_errorname", "") == "SQLITE_INTERRUPT":
                sentence = "the statement ran for too long and was stopped; make it touch fewer rows"
                raise BindingError(sentence, code="timeout", status=408) from None
            raise


def _own_classes(manifest: Manifest) -> list[str]:
    bound = [each.options for each in manifest.bindings if each.kind == "durable_object"]
    return [options["class_name"] for options in bound if options.get("script_name") in (None, manifest.name)]


def _sentences(gone: Mapping[str, str]) -> dict[str, str]:
    return {name: f"the class {name} was {what}" for name, what in gone.items()}


def _directory(state_dir: Path, services: Services) -> Path:
    return directory_of(state_dir, "durable_object", services.function)


def _checked(keys: Any) -> Any:
    if not 1 <= len(keys) <= MAX_KEYS:
        raise BindingError(f"storage takes 1 to {MAX_KEYS} keys at once, not {len(keys)}", name="RangeError")
    for key in keys:
        if not 1 <= len(key.encode("utf-8", "surrogatepass")) <= MAX_KEY_BYTES:
            raise BindingError(f"a storage key has 1 to {MAX_KEY_BYTES} bytes", name="RangeError")
    return keys


def _scalar(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if value is None or isinstance(value, (int, float, str, bytes)):
        return value
    raise BindingError(
        f"sql.exec cannot bind {type(value).__name__}; bind None, bool, int, float, str or bytes", name="TypeError"
    )
