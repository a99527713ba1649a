"""Storage of Durable Objects and its files: one instance, hostile requests, full disks, SIGKILL, and few open files."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.bindings.binding import BindingError, Services
from pilotlight.functions.bindings.objects.durable_objects import ObjectStorage
from pilotlight.functions.bindings.objects.object_file import ObjectFile
from pilotlight.functions.bindings.objects.object_store import ObjectKey, ObjectLimits, ObjectStore, Stale
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.manifest import Manifest
from pilotlight.support.database import DatabaseError, Databases
from tests.asgi import eventually

ID = "0" * 64
KEY = ObjectKey("Counter", ID)


def num_files(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.sqlite"))


def num_open_below(folder: Path) -> int:
    """Return how many databases in a folder this process has open."""
    paths = {str(path.resolve()) for path in Path("/proc/self/fd").iterdir()}
    return sum(path.startswith(str(folder)) and path.endswith(".sqlite") for path in paths)


def kinds(folder: Path) -> set[str]:
    """Return the suffixes of all files in a folder."""
    return {path.suffix for path in folder.rglob("*") if path.is_file()}


class Functions:
    """A stand-in for the site's functions, none of which is called."""


class Storage:
    """One object's storage, called as its instance would."""

    def __init__(self, binding: ObjectStorage, id: str = ID) -> None:
        self._binding = binding
        self._who: dict[str, Any] = {"class_name": "Counter", "id": id}

    async def start(self) -> "Storage":
        self._who["instance"] = await self._binding.call("start", [], self._who)
        return self

    async def __call__(self, method: str, **kwargs: Any) -> Any:
        return await self._binding.call(method, [], {**self._who, **kwargs})


@pytest.fixture
async def binding(tmp_path: Path) -> AsyncIterator[ObjectStorage]:
    services = Services(databases=Databases(), functions=Functions(), max_bytes=1 << 20)
    yield ObjectStorage.of(Manifest("f", tmp_path, tmp_path / "entry.py"), tmp_path, services)
    await services.databases.close()


async def test_a_second_instance_makes_the_first_stale_and_undoes_what_it_had_not_committed(
    binding: ObjectStorage,
) -> None:
    first = await Storage(binding).start()
    await first("put", entries={"kept": 1})
    await first("commit")
    await first("put", entries={"kept": 2})
    assert await first("get", keys=["kept"]) == {"kept": 2}
    second = await Storage(binding).start()
    assert await second("get", keys=["kept"]) == {"kept": 1}
    for method, further in (
        ("get", {"keys": ["kept"]}),
        ("put", {"entries": {"kept": 3}}),
        ("commit", {}),
        ("begin", {}),
    ):
        with pytest.raises(BindingError, match="was replaced") as caught:
            await first(method, **further)
        assert caught.value.code == "object_reset"
    await first("abandon")  # no effect: the instance was replaced
    assert await second("get", keys=["kept"]) == {"kept": 1}


@pytest.mark.parametrize(
    ("method", "kwargs"),
    [
        ("start", {"class_name": "../../etc", "id": ID}),
        ("start", {"class_name": "Counter", "id": "../" + "0" * 61}),
        ("start", {"class_name": "Counter", "id": "0" * 63}),
        ("start", {"class_name": "Counter", "id": ID + "\n"}),
        ("start", {"class_name": "Counter\n", "id": ID}),
        ("get", {"class_name": "Counter", "id": ID, "instance": 1, "keys": []}),
        ("get", {"class_name": "Counter", "id": ID, "instance": 1, "keys": ["x"] * 129}),
        ("get", {"class_name": "Counter", "id": ID, "instance": 1, "keys": ["x" * 2049]}),
        ("get", {"class_name": "Counter", "id": ID, "instance": 1, "keys": [""]}),
        ("put", {"class_name": "Counter", "id": ID, "instance": 1, "entries": {"x": b"x" * 2_000_000}}),
        ("put", {"class_name": "Counter", "id": ID, "instance": "1", "entries": {"x": 1}}),
        ("list", {"class_name": "Counter", "id": ID, "instance": 1, "limit": 0}),
        ("set_alarm", {"class_name": "Counter", "id": ID, "instance": 1, "at_ms": -1}),
        ("set_alarm", {"class_name": "Counter", "id": ID, "instance": 1, "at_ms": 10**18}),
        ("sql", {"class_name": "Counter", "id": ID, "instance": 1, "sql": "SELECT ?", "parameters": [[1]]}),
        ("path_of", {"class_name": "Counter", "id": ID}),
        ("get", {"class_name": "Counter", "id": ID, "instance": -7, "keys": ["x"]}),
    ],
)
async def test_hostile_requests_are_refused(
    binding: ObjectStorage, tmp_path: Path, method: str, kwargs: dict[str, Any]
) -> None:
    storage = await Storage(binding).start()
    with pytest.raises(BindingError):
        await binding.call(method, [], kwargs)
    await storage("put", entries={"x": 1})
    await storage("commit")
    assert num_files(tmp_path) == 1


async def test_a_full_storage_is_reported_and_its_content_stays(binding: ObjectStorage) -> None:
    storage = await Storage(binding).start()
    await storage("put", entries={"kept": 1})
    await storage("commit")

    async def fill() -> None:
        for n in range(100):
            await storage("put", entries={f"k{n}": b"x" * 50_000})
            await storage("commit")

    with pytest.raises(BindingError, match="the storage is full") as caught:
        await fill()
    assert caught.value.status == 507
    again = await Storage(binding).start()
    assert (await again("get", keys=["kept", "k0"]))["kept"] == 1
    await again("delete_all")
    await again("commit")
    await again("put", entries={"room": b"x" * 50_000})
    await again("commit")


async def test_a_statement_that_runs_for_too_long_is_stopped_and_says_so(tmp_path: Path) -> None:
    services = Services(databases=Databases(), functions=Functions())
    directory = directory_of(tmp_path, "durable_object", services.function)
    services.databases.get(directory, lambda path: ObjectStore(path, 1 << 20, limits=ObjectLimits(sql_s=0.05)))
    binding = ObjectStorage.of(Manifest("f", tmp_path, tmp_path / "entry.py"), tmp_path, services)
    storage = await Storage(binding).start()
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
    with pytest.raises(BindingError, match="ran for too long") as caught:
        await storage("sql", sql=endless)
    assert (caught.value.code, caught.value.status) == ("timeout", 408)
    assert (await storage("sql", sql="SELECT 1"))["rows"] == [[1]]
    await services.databases.close()


async def test_a_burst_of_which_a_part_fails_for_want_of_room_is_undone_whole(binding: ObjectStorage) -> None:
    storage = await Storage(binding).start()
    await storage("put", entries={"first": 1})

    async def fill() -> None:
        for n in range(100):
            await storage("put", entries={f"k{n}": b"x" * 50_000})

    with pytest.raises(BindingError, match="full"):
        await fill()
    with pytest.raises(BindingError, match="was replaced, or its storage failed"):
        await storage("commit")  # SQLite has rolled back the transaction, so the commit must fail
    assert await (await Storage(binding).start())("get", keys=["first", "k0"]) == {}


async def test_deleting_all_leaves_no_table_and_no_alarm(binding: ObjectStorage) -> None:
    storage = await Storage(binding).start()
    script = (
        "CREATE TABLE a (id INTEGER PRIMARY KEY); CREATE TABLE b (a REFERENCES a (id)); INSERT INTO a VALUES (1); INSERT INTO b VALUES (1);"
        "CREATE VIEW v AS SELECT * FROM a; CREATE VIRTUAL TABLE f USING fts5(text); INSERT INTO f VALUES ('x')"
    )
    await storage("sql", sql=script)
    await storage("put", entries={"x": 1})
    await storage("set_alarm", at_ms=8_000_000_000_000)
    await storage("commit")
    await storage("delete_all")
    await storage("commit")
    names = await storage(
        "sql", sql="SELECT name FROM sqlite_master WHERE name NOT LIKE '\\_cf%' ESCAPE '\\' AND name NOT LIKE 'sqlite%'"
    )
    assert names["rows"] == []
    assert await storage("get", keys=["x"]) == {}
    assert await storage("get_alarm") is None


async def test_few_files_are_open_and_none_that_is_in_use_is_closed(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path, 1 << 20, limits=ObjectLimits(open_files=3))
    keys = [ObjectKey("C", f"{n:064x}") for n in range(10)]
    numbers = [await store.start(key) for key in keys]
    # uncommitted, so the file must stay open
    await store.run(keys[0], lambda file: file.put({"x": b"\x01"}), numbers[0])
    await asyncio.gather(
        *(store.run(key, lambda file: file.get(["x"]), number) for key, number in zip(keys, numbers, strict=True))
    )
    assert num_open_below(tmp_path) <= 4
    assert await store.run(keys[0], lambda file: file.get(["x"]), numbers[0]) == {"x": 1}
    await store.close()


async def test_an_instance_that_is_reset_or_forgotten_is_stale_and_what_it_left_open_undone(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path, 1 << 20, limits=ObjectLimits(instances=2))

    def left_open(file: ObjectFile) -> None:
        file.put({"x": b"\x01"})

    number = await store.start(KEY)
    await store.run(KEY, left_open, number)
    await store.reset(KEY)
    assert not store.is_current(KEY, number)
    with pytest.raises(Stale):
        await store.run(KEY, left_open, number)
    assert await store.run(KEY, lambda file: file.get(["x"])) == {}
    others = [ObjectKey("Counter", f"{i:064x}") for i in range(1, 4)]
    numbers = [await store.start(key) for key in others]
    current = [store.is_current(key, number) for key, number in zip(others, numbers, strict=True)]
    assert current == [False, True, True], "the oldest instance was evicted"
    await store.close()


async def test_so_many_wait_for_one_object_and_no_more(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path, 1 << 20, limits=ObjectLimits(waiting=2))
    both = [asyncio.create_task(store.run(KEY, lambda file: file.get(["x"]))) for _ in range(2)]
    for _ in range(2):  # both tasks begin, and then their work
        await asyncio.sleep(0)
    with pytest.raises(DatabaseError, match="2 requests wait for this object's storage already"):
        await store.run(KEY, lambda file: file.get(["x"]))
    await asyncio.gather(*both)
    assert await store.run(KEY, lambda file: file.get(["x"])) == {}
    await store.close()


async def test_a_store_that_ends_leaves_each_object_in_one_file(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path, 1 << 20)
    for i in range(3):
        await store.run(ObjectKey("Counter", f"{i:064}"), lambda file: file.put({"a": b"1"}))
    await store.close()
    assert kinds(tmp_path) == {".sqlite"}
    await store.close()


async def test_work_continues_when_the_caller_has_left(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path, 1 << 20)
    number, begun, may_end = await store.start(KEY), threading.Event(), threading.Event()

    def slow(file: ObjectFile) -> None:
        begun.set()
        assert may_end.wait(60)
        file.put({"x": b"\x01"})
        file.commit()

    leaving = asyncio.ensure_future(store.run(KEY, slow, number))
    await eventually(begun.is_set)
    leaving.cancel()
    reading = asyncio.ensure_future(store.run(KEY, lambda file: file.get(["x"]), number))
    await asyncio.sleep(0)
    may_end.set()
    assert await reading == {"x": 1}  # runs after `slow`, not beside it
    with pytest.raises(Stale):
        await store.run(KEY, lambda file: file.get(["x"]), number + 1)
    await store.close()


KILLED = """
import asyncio, sys
from pathlib import Path
from pilotlight.functions.bindings.objects.object_store import ObjectKey, ObjectStore

async def main():
    store, key = ObjectStore(Path(sys.argv[1]), 1 << 30), ObjectKey("Counter", "0" * 64)
    number = await store.start(key)
    for n in range(100000):
        pair = {"a": bytes([n % 128]), "b": bytes([n % 128])}
        await store.run(key, lambda file: file.put({"a": pair["a"]}), number)
        await store.run(key, lambda file: file.put({"b": pair["b"]}), number)
        await store.run(key, lambda file: file.commit(), number)
        print(n % 128, flush=True)

asyncio.run(main())
"""


def killed(path: Path) -> list[int]:
    """Kill a process while it writes; return the numbers that it had reported as committed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    lines = [line for _, line in zip(range(50), process.stdout, strict=False)]
    process.send_signal(signal.SIGKILL)
    lines += process.stdout.readlines()
    process.wait()
    process.stdout.close()
    return [int(line) for line in lines if line.endswith("\n")]


@pytest.mark.process
async def test_what_was_committed_survives_kill_9_and_a_pair_stays_a_pair(tmp_path: Path) -> None:
    last = killed(tmp_path)[-1]
    store = ObjectStore(tmp_path, 1 << 30)
    found = await store.run(KEY, lambda file: file.get(["a", "b"]))
    await store.close()
    assert found["a"] == found["b"]
    assert found["a"] in (last, (last + 1) % 128)
