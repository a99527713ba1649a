"""Arguments that bindings accept as the platform does, and those that they refuse with a helpful error."""

from datetime import date
from typing import Any

import pytest

from pilotlight.functions.channel.failure import Failure
from tests.functions.bindings.conftest import Wire

KV, R2, D1 = ("kv", "KV", {"id": "ns"}), ("r2", "R2", {"bucket_name": "b"}), ("d1", "DB", {"database_id": "db"})


async def test_a_number_is_a_key_as_its_text_is(wire: Wire) -> None:
    env = (await wire(KV, R2)).env
    await env["KV"].put(5, "five")
    await env["R2"].put(6, "six")
    assert [await env["KV"].get("5"), (await env["KV"].get([5.0]))["5"], (await env["R2"].head("6")).key] == [
        "five",
        "five",
        "6",
    ]
    await env["KV"].delete(5)
    await env["R2"].delete([6])
    assert [await env["KV"].get(5), await env["R2"].get(6)] == [None, None]


@pytest.mark.parametrize(
    ("binding", "call", "sentence"),
    [
        (KV, lambda kv: kv.get(None), "KV get takes a key that is a str, and not NoneType"),
        (KV, lambda kv: kv.delete(["a"]), "KV delete takes a key that is a str, and not list"),
        (KV, lambda kv: kv.put("a", "b", metadata={"a": {1}}), "KV put: the metadata contains a value of type 'set', which JSON cannot represent"),
        (R2, lambda r2: r2.put("a", "b", md5="zz"), "md5 is bytes or their hexadecimal digits, and not 'zz'"),
        (R2, lambda r2: r2.put("a", "b", customMetadata={"a": [1]}), "the value of 'a' must be a str, and not list"),
    ],
)  # fmt: skip
async def test_a_binding_names_what_it_does_not_take(wire: Wire, binding: Any, call: Any, sentence: str) -> None:
    env = (await wire(binding)).env
    with pytest.raises(TypeError, match=sentence):
        await call(env[binding[1]])


async def test_what_a_binding_cannot_read_is_named_by_its_place(wire: Wire) -> None:
    env = (await wire(("queue_producer", "Q", {"queue": "q"}), R2)).env
    with pytest.raises(
        Failure, match=r"queue_producer.send of messages\[0\].delay_seconds: Expected `float` <= 43200.0"
    ):
        await env["Q"].send("x", delaySeconds=99_999)
    with pytest.raises(Failure, match=r"r2.put of details.storage_class: Invalid enum value 'Cold'$"):
        await env["R2"].put("k", "v", storageClass="Cold")


async def test_a_value_that_is_no_json_is_named_by_its_key(wire: Wire) -> None:
    kv = (await wire(KV)).env["KV"]
    await kv.put("k", "no json")
    for keys in ("k", ["k"]):
        with pytest.raises(ValueError, match="the value of 'k' is no JSON: Expecting value"):
            await kv.get(keys, "json")


async def test_metadata_are_what_json_makes_of_them(wire: Wire) -> None:
    env = (await wire(KV, R2)).env
    await env["KV"].put("k", "v", metadata={"at": date(2026, 1, 2)})
    assert (await env["KV"].getWithMetadata("k")).metadata == {"at": "2026-01-02T00:00:00.000Z"}
    await env["R2"].put("k", "v", customMetadata={"n": 5, "x": 1.5, "yes": True, 7: "seven"})
    assert (await env["R2"].head("k")).customMetadata == {"n": "5", "x": "1.5", "yes": "true", "7": "seven"}


async def test_a_blob_can_be_bound_as_it_was_read_and_what_cannot_be_bound_is_named(wire: Wire) -> None:
    db = (await wire(D1)).env["DB"]
    blob = await db.prepare("SELECT x'0102' AS b").first("b")
    assert await db.prepare("SELECT hex(?) AS h").bind(blob).first("h") == "0102"
    for value in ({"a": 1}, [1.5], date(2026, 1, 2)):
        with pytest.raises(Exception, match=f"D1_TYPE_ERROR: Type '{type(value).__name__}' not supported for value"):
            db.prepare("SELECT ?").bind(value)


async def test_a_data_point_is_refused_where_it_is_written(wire: Wire) -> None:
    points = (await wire(("analytics_engine", "AE", {"dataset": "d"}))).env["AE"]
    for point, sentence in (
        ({"blobs": "abc"}, "blobs is a list, and not str"),
        ({"blobs": ["x"] * 21}, "blobs has at most 20 values, and not 21"),
        ({"doubles": ["1"]}, "doubles has numbers, and not str"),
        ({"indexes": ["a", "b"]}, "indexes has at most 1 values, and not 2"),
    ):
        with pytest.raises(TypeError, match=f"writeDataPoint: {sentence}"):
            points.writeDataPoint(point)


async def test_invalid_vectors_are_named_and_a_write_has_the_id_of_its_mutation(wire: Wire) -> None:
    index = (await wire(("vectorize", "V", {"index_name": "i"}))).env["V"]
    with pytest.raises(TypeError, match="takes a list of vectors"):
        await index.insert({"id": "1", "values": [1]})
    with pytest.raises(TypeError, match="'id' is missing"):
        await index.insert([{"values": [1]}])
    written = await index.insert([{"id": "1", "values": [1]}])
    assert (len(written.mutationId), written.ids) == (36, ["1"])


async def test_a_queue_takes_moments_as_json_writes_them_and_names_what_it_does_not_take(wire: Wire) -> None:
    queue = (await wire(("queue_producer", "Q", {"queue": "q"}))).env["Q"]
    await queue.send({"at": date(2026, 1, 2)})
    with pytest.raises(TypeError, match=r"bytes and v8 take others\) contains a value of type 'bytes'"):
        await queue.send({"a": b"x"})
    with pytest.raises(TypeError, match="content type is one of json, text, bytes, v8, and not 'xml'"):
        await queue.send("x", contentType="xml")


async def test_options_of_an_object_come_by_name_too(wire: Wire) -> None:
    class Nobody:
        """A stand-in for the site's functions that must not be called."""

    declared = ("durable_object", "O", {"class_name": "C"})
    objects = (await wire(declared, functions=Nobody())).env["O"]
    assert (
        objects.getByName("x", locationHint="weur").id
        == objects.get(objects.idFromName("x"), {"locationHint": "enam"}).id
    )
    assert len(str(objects.newUniqueId(jurisdiction="eu"))) == 64
    assert objects.idFromName(5) == objects.idFromName("5")
    with pytest.raises(TypeError, match="has no option 'locationhint'; did you mean 'location_hint'"):
        objects.getByName("x", {"locationhint": "weur"})
