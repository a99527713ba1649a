"""Vectorize: results equal to a full comparison of all vectors, filters, limits, and restarts."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pilotlight.functions.bindings.binding import BindingLimits
from pilotlight.functions.channel.failure import Failure
from tests.functions.bindings.conftest import Wire

INDEX = ("vectorize", "V", {"index_name": "docs"})


def cosine(one: Any, other: Any) -> float:
    return float(np.dot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)))


@pytest.mark.parametrize("limits", [BindingLimits(index_block_bytes=64), BindingLimits()])
async def test_the_nearest_are_those_of_the_highest_cosine(wire: Wire, limits: BindingLimits) -> None:
    index = (await wire(INDEX, limits=limits)).env["V"]
    random = np.random.default_rng(1)
    vectors = {f"v{n:03}": random.normal(size=17) * n for n in range(1, 200)}
    await index.insert([{"id": id, "values": values} for id, values in vectors.items()])
    wanted = random.normal(size=17)
    found = await index.query(wanted, topK=7, returnValues=True)
    expected = sorted(vectors, key=lambda id: -cosine(vectors[id], wanted))[:7]
    assert [match.id for match in found.matches] == expected
    assert found.count == 7
    for match in found.matches:
        assert match.score == pytest.approx(cosine(vectors[match.id], wanted), abs=1e-5)
        assert match["values"] == pytest.approx(vectors[match.id].tolist(), rel=1e-5)
    assert (await index.query_by_id("v005", top_k=1)).matches[0].id == "v005"
    assert await index.describe() == {"dimensions": 17, "vectorCount": 199, "metric": "cosine"}


async def test_a_query_holds_a_block_in_memory_and_not_the_index(wire: Wire) -> None:
    index = (await wire(INDEX, limits=BindingLimits(index_block_bytes=64 << 10))).env["V"]
    vectors = np.random.default_rng(1).normal(size=(2000, 256))
    for start in (0, 1000):
        rows = vectors[start : start + 1000].tolist()
        await index.upsert([{"id": f"{start + n}", "values": row} for n, row in enumerate(rows)])
    tracemalloc.start()
    try:
        for _ in range(3):
            assert (await index.query(vectors[7].tolist(), topK=1)).matches[0].id == "7"
            await index.upsert([{"id": "7", "values": vectors[7].tolist()}])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, "the whole index would take 2 MiB"


@pytest.mark.parametrize("limits", [BindingLimits(index_block_bytes=64), BindingLimits()])
async def test_namespaces_and_filters_choose_before_the_nearest_are_counted(wire: Wire, limits: BindingLimits) -> None:
    index = (await wire(INDEX, limits=limits)).env["V"]
    await index.upsert(
        [
            {
                "id": f"{n}",
                "values": [1.0, n],
                "namespace": "even" if n % 2 == 0 else "odd",
                "metadata": {"n": n, "a": {"b": f"{n}"}},
            }
            for n in range(10)
        ]
    )

    async def ids(**options: Any) -> list[str]:
        return [match.id for match in (await index.query([1.0, 0.0], topK=3, **options)).matches]

    assert await ids(namespace="odd") == ["1", "3", "5"]
    assert await ids(filter={"n": {"$gte": 4, "$ne": 5}}) == ["4", "6", "7"]
    assert await ids(filter={"a.b": {"$in": ["8", "9"]}, "n": {"$lt": 9}}) == ["8"]
    assert await ids(filter={"n": {"$gt": "text"}}) == []
    match = (await index.query([1.0, 0.0], topK=1, returnMetadata="all")).matches[0]
    assert match.metadata == {"n": 0, "a": {"b": "0"}}
    assert "values" not in match


@pytest.mark.parametrize(
    ("rule", "passing"),
    [
        (2, "2"), ({"$eq": 2}, "2"), ({"$ne": 2}, "013z"), ({"$in": [1, 2]}, "12"), ({"$nin": [1, 2]}, "03z"),
        ({"$lt": 2}, "01"), ({"$lte": 2}, "012"), ({"$gt": 2}, "3"), ({"$gte": 2}, "23"),
    ],
)  # fmt: skip
async def test_each_word_of_a_filter_means_what_it_says_also_of_what_has_no_metadata(
    wire: Wire, rule: Any, passing: str
) -> None:
    index = (await wire(INDEX)).env["V"]
    await index.insert([{"id": f"{n}", "values": [1, n], "metadata": {"n": n}} for n in range(4)])
    await index.insert([{"id": "z", "values": [0, 0]}])
    found = await index.query([1, 0], topK=5, filter={"n": rule}, returnMetadata="all")
    assert sorted(match.id for match in found.matches) == list(passing)


async def test_a_vector_of_noughts_is_near_nothing_and_vectors_come_back_as_they_were_asked_for(wire: Wire) -> None:
    index = (await wire(INDEX)).env["V"]
    await index.insert([{"id": "b", "values": [0, 0]}, {"id": "a", "values": [3, 0], "namespace": "n"}])
    assert [(match.id, match.score) for match in (await index.query([2, 0])).matches] == [("a", 1.0), ("b", 0.0)]
    assert [match.score for match in (await index.query([0, 0])).matches] == [0.0, 0.0]
    assert [each["id"] for each in await index.get_by_ids(["b", "c", "a"])] == ["b", "a"]
    (match, _) = (await index.query([1, 0])).matches
    assert (match.namespace, "metadata" in match) == ("n", False)


async def test_insert_leaves_what_is_there_and_upsert_replaces_it_also_after_a_restart(wire: Wire) -> None:
    first = (await wire(INDEX)).env["V"]
    await first.insert([{"id": "a", "values": [1, 0]}])
    assert (await first.insert([{"id": "a", "values": [0, 1]}, {"id": "b", "values": [0, 1]}]))["ids"] == ["b"]
    again = (await wire(INDEX)).env["V"]
    assert [each["values"] for each in await again.get_by_ids(["a", "b", "c"])] == [[1, 0], [0, 1]]
    await again.upsert([{"id": "a", "values": [0, 2]}])
    assert (await again.get_by_ids(["a"]))[0]["values"] == [0, 2]
    assert (await again.delete_by_ids(["a", "c"]))["count"] == 1
    assert (await again.query([1, 1])).count == 1


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda v: v.insert([{"id": "x", "values": [1, 2, 3]}]), "has 3 numbers, but the index has vectors of 2"),
        (lambda v: v.query([1, 2, 3]), "has 3 numbers, but the index has vectors of 2"),
        (lambda v: v.insert([{"id": "x", "values": [1, float("inf")]}]), "NaN or infinite"),
        (lambda v: v.insert([{"id": "x", "values": []}]), "length >= 1"),
        (lambda v: v.insert([{"id": "x" * 65, "values": [1, 2]}]), "length <= 64"),
        (lambda v: v.query([1, 2], topK=101), "<= 100"),
        (lambda v: v.query([1, 2], filter={"n": {"$near": 1}}), r"no '\$near'"),
        (lambda v: v.query_by_id("nobody"), "no vector 'nobody'"),
        (lambda v: v.insert([{"id": "x", "values": [1, 2], "metadata": {"t": "x" * 10_240}}]), "more than 10240 bytes"),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(
    wire: Wire, act: Callable[[Any], Any], sentence: str
) -> None:
    index = (await wire(INDEX)).env["V"]
    await index.insert([{"id": "a", "values": [1, 0]}])
    with pytest.raises(Failure, match=sentence):
        await act(index)
    assert (await index.describe())["vectorCount"] == 1


async def test_an_index_that_is_full_takes_nothing_of_a_batch(wire: Wire) -> None:
    index = (await wire(INDEX, limits=BindingLimits(index_vectors=2))).env["V"]
    with pytest.raises(Failure, match="at most 2 vectors"):
        await index.insert([{"id": f"{n}", "values": [n, 1]} for n in range(3)])
    assert (await index.describe())["vectorCount"] == 0
