"""The bucket declaration that the R2 tests share, and the list of its files."""

from pathlib import Path

from workers.bindings.r2 import R2Object, R2ObjectBody

R2 = ("r2", "BUCKET", {"bucket_name": "photos"})
MIB = 1 << 20


async def read(found: R2Object | None) -> bytes:
    assert isinstance(found, R2ObjectBody)
    return await found.bytes()


def files(root: Path) -> list[Path]:
    return [path for path in (root / "bindings" / "r2").rglob("*") if path.is_file() and "index" not in path.name]
