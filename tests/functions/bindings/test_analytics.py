"""Analytics Engine: data points as rows, written in the background."""

import sqlite3
from contextlib import suppress
from pathlib import Path

import pytest

from pilotlight.functions.bindings import analytics
from pilotlight.functions.bindings.binding import BindingLimits
from pilotlight.functions.channel.failure import Failure
from tests.asgi import eventually
from tests.functions.bindings.conftest import Wire

DATASET = ("analytics_engine", "A", {"dataset": "visits"})


def rows(tmp_path: Path) -> list[tuple[object, ...]]:
    path = analytics.dataset_file(tmp_path, "visits")
    if not path.exists():
        return []
    with sqlite3.connect(path) as connection, suppress(sqlite3.OperationalError):  # the file is being created
        return connection.execute("SELECT index1, blob1, blob2, double1, double2 FROM points").fetchall()
    return []


async def test_a_point_is_a_row_with_the_platforms_columns(wire: Wire, tmp_path: Path) -> None:
    dataset = (await wire(DATASET)).env["A"]
    dataset.writeDataPoint({"blobs": ["Rome", None], "doubles": [1, 2.5], "indexes": ["user"]})
    dataset.write_data_point({})
    await eventually(lambda: len(rows(tmp_path)) == 2)
    assert rows(tmp_path)[0] == ("user", "Rome", None, 1.0, 2.5)


async def test_a_point_that_is_too_large_is_refused(wire: Wire) -> None:
    wired = await wire(DATASET)
    largest = {"blobs": ["é" * 4096, None, "x" * 8192], "indexes": ["é" * 48], "doubles": [1.0] * 20}
    assert await wired.raw("A", "write", **largest) is None
    for point in (
        {"blobs": ["é" * 4096, "x" * 8193]}, {"indexes": ["é" * 48 + "x"]}, {"indexes": ["a", "b"]}, {"doubles": [1.0] * 21}, {"blobs": [1]},
    ):  # fmt: skip
        with pytest.raises(Failure):
            await wired.raw("A", "write", **point)


@pytest.mark.long
async def test_the_oldest_points_go_when_a_dataset_is_full(wire: Wire, tmp_path: Path) -> None:
    wired = await wire(DATASET, limits=BindingLimits(dataset_points=1990))
    for _ in range(2000):
        await wired.raw("A", "write", doubles=[1.0])
    assert len(rows(tmp_path)) == 1990
