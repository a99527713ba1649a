"""KV and its SQLite file: values, metadata, expiry, lists, limits, and writers that are killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.bindings.binding import BindingError, BindingLimits, MemoryBudget
from pilotlight.functions.bindings.storage.kv import SCHEMA, SWEPT_AT_ONCE, KVNamespace
from pilotlight.functions.channel.failure import Failure
from pilotlight.support.database import Connection, Database, create, transaction
from tests.asgi import eventually
from tests.clock import Clock
from tests.functions.bindings.conftest import Wire
from workers.http.streams import ByteStream

MAX_VALUE_BYTES = BindingLimits.kv_value_bytes
KV = ("kv", "KV", {"id": "notes"})


async def test_a_value_that_was_put_is_there_in_every_type(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    await kv.put("greeting", '{"hello": ["wörld", null]}')
    assert await kv.get("greeting") == '{"hello": ["wörld", null]}'
    value = await kv.get("greeting", "json")
    assert value == {"hello": ["wörld", None]}
    assert value.hello[0] == "wörld"
    assert (await kv.get("greeting", {"type": "arrayBuffer"})).to_bytes() == '{"hello": ["wörld", null]}'.encode()
    stream = await kv.get("greeting", type="stream")
    assert isinstance(stream, ByteStream)
    assert await stream.json() == value
    await kv.delete("greeting")
    assert await kv.get("greeting") is None
    assert await kv.get("greeting", type="stream") is None


async def test_the_keys_of_a_list_are_an_attribute_as_documented_and_a_dicts_method_still(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    await kv.put("a", "1")
    listed = await kv.list()
    assert [key.name for key in listed.keys] == [key.name for key in listed["keys"]] == ["a"]
    assert sorted(listed.keys()) == sorted(listed) == sorted(dict(listed)) == ["cacheStatus", "keys", "list_complete"]
    assert json.loads(json.dumps(listed))["keys"] == listed.to_py()["keys"] == [{"name": "a"}]


async def test_bytes_and_streams_of_megabytes_come_back_unchanged(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    data = os.urandom(3 << 20)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 100_000):
            yield data[start : start + 100_000]

    await kv.put("streamed", pieces())
    await kv.put("whole", data)
    await kv.put("largest", bytes(MAX_VALUE_BYTES))
    assert await kv.get("whole", "arrayBuffer") == data
    assert await (await kv.get("streamed", "stream")).bytes() == data
    assert len(await kv.get("largest", "arrayBuffer")) == MAX_VALUE_BYTES


async def test_metadata_comes_with_the_value_and_in_lists(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    await kv.put("a", "1", {"metadata": {"owner": "me", "tags": [1, 2]}})
    await kv.put("b", "2")
    found = await kv.getWithMetadata("a")
    assert (found.value, found.metadata.owner, found["metadata"]["tags"]) == ("1", "me", [1, 2])
    assert (await kv.get_with_metadata("b")).metadata is None
    assert (await kv.get_with_metadata("none")) == {"value": None, "metadata": None, "cacheStatus": None}
    assert (await kv.list()).to_py() == {
        "keys": [{"name": "a", "metadata": {"owner": "me", "tags": [1, 2]}}, {"name": "b"}],
        "list_complete": True,
        "cacheStatus": None,
    }


async def test_several_keys_are_read_at_once(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    await kv.put("a", "[1]", metadata={"x": 1})
    await kv.put("b", "2")
    assert await kv.get(["a", "b", "c"]) == {"a": "[1]", "b": "2", "c": None}
    assert await kv.get(["a", "c"], "json") == {"a": [1], "c": None}
    found = await kv.get_with_metadata(["a", "c"])
    assert found["a"].metadata.x == 1
    assert found["c"].value is None
    with pytest.raises(Failure, match="maximum of 100 keys"):
        await kv.get([f"k{i}" for i in range(101)])
    with pytest.raises(TypeError, match="text and json"):
        await kv.get(["a"], "stream")


async def test_a_list_continues_at_its_cursor(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    names = sorted([f"user:{i:03}" for i in range(25)] + ["user:é", "user:\U0001f600"], key=str.encode)
    for name in [*names, "uses", "user", "vser:1"]:
        await kv.put(name, "x")
    seen: list[str] = []
    cursor = None
    while True:
        page = await kv.list(prefix="user:", limit=10, cursor=cursor)
        seen += [key.name for key in page["keys"]]
        if page.list_complete:
            assert "cursor" not in page
            break
        cursor = page.cursor
    assert seen == names
    with pytest.raises(Failure, match="Invalid cursor"):
        await kv.list(cursor="not base64!")
    with pytest.raises(Failure, match="Invalid key_count_limit of 1001"):
        await kv.list({"limit": 1001})


async def test_expired_keys_are_neither_read_nor_listed_and_are_deleted_in_time(tmp_path: Path) -> None:
    clock = Clock(1_000_000.0)
    database = Database(tmp_path / "kv.sqlite", lambda c: create(c, SCHEMA))
    kv = KVNamespace(database, clock)

    async def count() -> int:
        return await database.run(lambda c: int(c.execute("SELECT count(*) FROM entries").fetchone()[0]))

    try:
        await kv.call("put", [], {"key": "ttl", "value": b"1", "expiration_ttl": 60})
        await kv.call("put", [], {"key": "at", "value": b"2", "expiration": 1_000_100})
        await kv.call("put", [], {"key": "ever", "value": b"3"})
        listed = await kv.call("list", [], {})
        assert listed["keys"] == [["at", 1_000_100, None], ["ever", None, None], ["ttl", 1_000_060, None]]
        clock.now += 60
        assert await kv.call("get", ["ttl"], {}) == {"found": False}
        assert await kv.call("get_many", [["ttl", "at"]], {}) == [None, [b"2", None]]
        clock.now += 60
        assert [key[0] for key in (await kv.call("list", [], {}))["keys"]] == ["ever"]
        assert await count() == 3
        await kv.call("put", [], {"key": "new", "value": b""})
        assert await count() == 2
        for wrong in ({"expiration_ttl": 59}, {"expiration": int(clock.now) + 59}, {"expiration_ttl": 2**60}):
            with pytest.raises(BindingError, match="400 Invalid expiration"):
                await kv.call("put", [], {"key": "k", "value": b"", **wrong})
    finally:
        await database.close()


async def test_expired_keys_are_deleted_as_fast_as_others_expire(tmp_path: Path) -> None:
    clock = Clock(1_000_000.0)
    database = Database(tmp_path / "kv.sqlite", lambda c: create(c, SCHEMA))
    kv = KVNamespace(database, clock)

    def fill(connection: Connection) -> None:
        insert = "INSERT INTO entries (key, expires_s, metadata, value) VALUES (?, 1000060, NULL, x'')"
        with transaction(connection):
            connection.executemany(insert, [(f"{number}".encode(),) for number in range(2 * SWEPT_AT_ONCE + 1)])

    try:
        await kv.call("put", [], {"key": "first", "value": b""})
        await database.run(fill)
        clock.now += 60
        for number in range(3):
            await kv.call("put", [], {"key": f"k{number}", "value": b""})
        assert await database.run(lambda c: c.execute("SELECT count(*) FROM entries").fetchone()[0]) == 4
    finally:
        await database.close()


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("", "cannot be empty"),
        (".", "is not allowed as a key name"),
        ("..", "is not allowed as a key name"),
        ("ä" * 257, "414 UTF-8 encoded length of 514 exceeds key length limit of 512"),
    ],
)
async def test_a_key_that_the_platform_refuses_is_refused(wire: Wire, key: str, sentence: str) -> None:
    kv = (await wire(KV)).env["KV"]
    for attempt in (kv.get(key), kv.put(key, "x"), kv.delete(key)):
        with pytest.raises(Failure, match=sentence):
            await attempt


async def test_odd_keys_are_keys_like_others(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    for key in ("../../etc/passwd", "a\0b", "a\nb", "'; DROP TABLE entries; --", "%", "ä" * 256):
        await kv.put(key, key)
    for key in ("../../etc/passwd", "a\0b", "a\nb", "'; DROP TABLE entries; --", "%", "ä" * 256):
        assert await kv.get(key) == key


async def test_values_and_metadata_beyond_the_limits_are_refused(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    with pytest.raises(Failure, match="413 Value length of 26214401 exceeds limit of 26214400"):
        await kv.put("k", bytes(MAX_VALUE_BYTES + 1))
    with pytest.raises(Failure, match="413 Metadata length of 1026 exceeds limit of 1024"):
        await kv.put("k", "v", metadata="x" * 1024)
    await kv.put("k", "v", metadata="x" * 1022)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield bytes(1 << 20)

    with pytest.raises(Failure, match="413 Value length"):
        await kv.put("k", endless())
    assert await kv.get("k") == "v"


async def test_the_values_of_one_read_are_bounded(wire: Wire) -> None:
    wired = await wire(KV, limits=BindingLimits(kv_value_bytes=1000))
    for key in ("a", "b", "c"):
        await wired.env["KV"].put(key, "x" * 500)
    assert await wired.raw("KV", "get_many", ["a", "none", "b"]) == [[b"x" * 500, None], None, [b"x" * 500, None]]
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("get_many", {"keys": ["a", "b", "c"]}, "413 Total size of request exceeds the limit of 1000 bytes"),
        ("get_many", {"keys": ["a"] * 101}, "400 You can request a maximum of 100 keys"),
        ("get_many", {"keys": ["a", ""]}, "Key name cannot be empty"),
        ("get_many", {"keys": ["a"], "cache_ttl": 29}, "400 Invalid cache_ttl of 29"),
        ("get", {"key": "a", "cache_ttl": 29}, "400 Invalid cache_ttl of 29"),
        ("list", {"prefix": "x" * 513}, "414 UTF-8 encoded length of 513 exceeds key length limit of 512"),
        ("list", {"limit": 0}, "400 Invalid key_count_limit of 0"),
        ("list", {"limit": 1001}, "400 Invalid key_count_limit of 1001"),
        ("put", {"key": "a"}, "neither a value nor a stream"),
    ]
    for method, asked, sentence in refused:
        with pytest.raises(Failure, match=sentence):
            await wired.raw("KV", method, **asked)
    assert (await wired.raw("KV", "get", key="a", cache_ttl=30))["found"]
    assert (await wired.raw("KV", "list", prefix="x" * 512, limit=1000))["keys"] == []


async def test_mistakes_are_named_with_the_right_value(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    with pytest.raises(TypeError, match=r"no option 'expirationTTl'; did you mean 'expiration_ttl'"):
        await kv.put("k", "v", {"expirationTTl": 60})
    with pytest.raises(TypeError, match="takes str, bytes or a stream of them, not dict"):
        await kv.put("k", {"a": 1})
    with pytest.raises(TypeError, match="unknown type 'xml'"):
        await kv.get("k", "xml")
    with pytest.raises(AttributeError, match=r"no 'getall'; it has .*get_with_metadata"):
        kv.getall("k")


async def test_a_hostile_process_gets_refusals_and_no_more(wire: Wire) -> None:
    wired = await wire(KV)
    attempts: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("get", (5,), {}),
        ("get", ("a", True, 60, "more"), {}),
        ("put", (), {"key": "a", "value": "text", "path": "/etc/passwd"}),
        ("put", ("a",), {}),
        ("put", ("a", b"1"), {"metadata": "{not json"}),
        ("list", (), {"limit": 2**62}),
        ("get_many", ([],), {}),
        ("close", (), {}),
        ("_run", (), {}),
        ("call", (), {}),
    ]
    for method, args, kwargs in attempts:
        with pytest.raises(Failure) as caught:
            await wired.raw("KV", method, *args, **kwargs)
        assert caught.value.status == 400, (method, args)
    with pytest.raises(Failure, match="there is no binding 'OTHER'"):
        await wired.raw("OTHER", "get", "a")
    assert await wired.env["KV"].get("a") is None


async def test_namespaces_with_odd_ids_are_apart_and_stay_below_the_state(wire: Wire, tmp_path: Path) -> None:
    ids = ["../../../outside", "a/b", "a.b", "a b", "", "x" * 300, "A", "con\0"]
    wired = await wire(*[("kv", f"KV{i}", {"id": id}) for i, id in enumerate(ids)])
    for i in range(len(ids)):
        await wired.env[f"KV{i}"].put("k", str(i))
    assert [await wired.env[f"KV{i}"].get("k") for i in range(len(ids))] == [str(i) for i in range(len(ids))]
    assert len(list((tmp_path / "bindings" / "kv").glob("*/entries.sqlite"))) == len(ids)
    assert not (tmp_path.parent / "outside").exists()


async def test_two_functions_that_bind_one_namespace_share_it(wire: Wire) -> None:
    wired = await wire(KV, ("kv", "SAME", {"id": "notes"}))
    await asyncio.gather(*[wired.env[name].put(f"{name}{i}", "x") for name in ("KV", "SAME") for i in range(20)])
    assert len((await wired.env["KV"].list())["keys"]) == 40


async def test_a_full_namespace_says_so_and_still_reads_and_deletes(wire: Wire) -> None:
    kv = (await wire(KV, max_bytes=1 << 20)).env["KV"]
    await kv.put("small", "x")

    async def fill() -> None:
        for i in range(40):
            await kv.put(f"k{i}", bytes(100_000))

    with pytest.raises(Failure, match="507 the storage is full") as caught:
        await fill()
    assert (caught.value.code, caught.value.status) == ("storage_full", 507)
    assert await kv.get("small") == "x"
    await kv.delete("k0")
    await kv.put("again", bytes(50_000))


WRITER = """
import asyncio, sys
from pathlib import Path
from pilotlight.functions.bindings.binding import BindingError, MemoryBudget
from pilotlight.support.database import Database, create
from pilotlight.functions.bindings.storage.kv import SCHEMA, KVNamespace

async def main():
    kv = KVNamespace(Database(Path(sys.argv[1]), lambda c: create(c, SCHEMA)))
    prefix = sys.argv[2]
    for i in range(100000):
        while True:
            try:
                await kv.call("put", [], {"key": f"{prefix}{i:06}", "value": (f"{i}:" + "x" * 20000).encode()})
                break
            except BindingError as error:
                if error.status != 503:  # SQLite's lock is not fair: "another process writes; try again"
                    raise
        print(i, flush=True)

asyncio.run(main())
"""


def writer(path: Path, prefix: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), prefix],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.process
async def test_every_acknowledged_value_survives_kill_9_of_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "kv.sqlite"
    writers = {prefix: writer(path, prefix) for prefix in ("a", "b")}
    acknowledged = dict.fromkeys(writers, -1)
    for prefix, process in writers.items():
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged[prefix] = int(line)
            if acknowledged[prefix] >= 25:
                break
    for process in writers.values():
        process.send_signal(signal.SIGKILL)
    for prefix, process in writers.items():
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip().isdigit() and line.endswith("\n"):
                acknowledged[prefix] = int(line)
        process.wait()
        process.stdout.close()
    database = Database(path, lambda c: create(c, SCHEMA))
    kv = KVNamespace(database)
    try:
        for prefix, last in acknowledged.items():
            assert last >= 25
            for i in range(last + 1):
                found = await kv.call("get", [f"{prefix}{i:06}"], {})
                assert found["value"] == (f"{i}:" + "x" * 20000).encode()
        check = await database.run(lambda c: c.execute("PRAGMA integrity_check").fetchone()[0])
        assert check == "ok"
    finally:
        await database.close()


async def test_metadata_is_json_for_every_reader(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    for metadata in ("text", 5, [1, {"a": None}], {"ü": "\U0001f600"}, False):
        await kv.put("k", "v", metadata=metadata)
        assert json.dumps((await kv.get_with_metadata("k")).metadata) == json.dumps(metadata)


async def test_values_that_are_streamed_at_once_hold_a_bounded_number_of_bytes(wire: Wire) -> None:
    memory = MemoryBudget(1000)
    wired = await wire(KV, memory=memory)
    kv, go = wired.env["KV"], asyncio.Event()

    async def slowly(size: int) -> AsyncIterator[bytes]:
        yield bytes(size)
        await go.wait()

    puts = [asyncio.ensure_future(kv.put(f"k{n}", slowly(400))) for n in range(5)]
    await eventually(lambda: sum(put.done() for put in puts) == 3)
    assert memory.used == 800
    go.set()
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    refused = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert [(each.status, each.code) for each in refused] == [(429, "overloaded")] * 3
    assert memory.used == 0
    await kv.put("large", bytes(900_000))
    one = await kv.get("large", "stream")
    with pytest.raises(Failure, match="open calls hold 900000 bytes already, of at most 1000"):
        await kv.get("large", "stream")
    assert len(await one.bytes()) == 900_000
    await eventually(lambda: memory.used == 0)
    left = await kv.get("large", "stream")
    await left.cancel()
    await eventually(lambda: memory.used == 0)
