"""Analytics Engine: one SQLite file of data points for each dataset of this site.

`pilotlight analytics query` reads them.

The columns are the platform's (https://developers.cloudflare.com/analytics/analytics-engine/sql-reference): timestamp, index1, blob1 to blob20,
double1 to double20. Nothing is sampled: every point is kept, and a full dataset drops its oldest points.
"""

import time
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pilotlight.functions.bindings.binding import Binding, BindingError, Services, method
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.manifest import BindingDeclaration
from pilotlight.support.database import Connection, Database

COLUMNS = 20
MAX_BLOB_BYTES = 16 << 10  # limit for all blobs of one point
MAX_INDEX_BYTES = 96
NAMES = (*(f"blob{n}" for n in range(1, COLUMNS + 1)), *(f"double{n}" for n in range(1, COLUMNS + 1)))
SCHEMA = f"CREATE TABLE IF NOT EXISTS points (timestamp TEXT NOT NULL, index1 TEXT, {', '.join(NAMES)})"


class DataPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    blobs: Annotated[list[str | None], Meta(max_length=COLUMNS)] = []
    doubles: Annotated[list[float | None], Meta(max_length=COLUMNS)] = []
    indexes: Annotated[list[str | None], Meta(max_length=1)] = []


class AnalyticsEngine(Binding):
    kind = "analytics_engine"

    def __init__(self, database: Database, max_points: int) -> None:
        self._database = database
        self._max_points = max_points

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "AnalyticsEngine":
        dataset = declaration.options.get("dataset") or declaration.name
        return cls(services.database(dataset_file(state_dir, dataset), SCHEMA), services.limits.dataset_points)

    @method
    async def write(self, request: DataPoint) -> None:
        if sum(len((blob or "").encode()) for blob in request.blobs) > MAX_BLOB_BYTES:
            raise BindingError(f"the blobs of a data point have at most {MAX_BLOB_BYTES} bytes together", status=413)
        index = request.indexes[0] if request.indexes else None
        if index is not None and len(index.encode()) > MAX_INDEX_BYTES:
            raise BindingError(f"the index of a data point has at most {MAX_INDEX_BYTES} bytes", status=413)
        now_s = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now_s))
        blobs = [*request.blobs, *[None] * (COLUMNS - len(request.blobs))]
        doubles = [*request.doubles, *[None] * (COLUMNS - len(request.doubles))]

        def work(connection: Connection) -> None:
            places = ", ".join("?" * (2 + 2 * COLUMNS))
            last = connection.execute(
                f"INSERT INTO points VALUES ({places})", (stamp, index, *blobs, *doubles)
            ).lastrowid
            if last is not None and last > self._max_points and last % 1000 == 0:  # drop the oldest points
                connection.execute("DELETE FROM points WHERE rowid <= ?", (last - self._max_points,))

        await self._database.run(work)


def dataset_file(state_dir: Path, dataset: str) -> Path:
    return directory_of(state_dir, "analytics_engine", dataset) / "points.sqlite"
