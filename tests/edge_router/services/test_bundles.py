"""The router's bundles: stored whole or not at all, named by their digests."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.edge_router.services.bundles import KEPT_S, BundleStore
from pilotlight.wire.hop.bundles import BundleError, BundleLimits, digest_of, pack


def bundle(folder: Path, text: str) -> bytes:
    folder.mkdir(exist_ok=True)
    (folder / "main.py").write_text(text)
    return pack(folder)


async def in_pieces(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def test_a_bundle_that_comes_in_pieces_is_there_until_no_version_names_it(tmp_path: Path) -> None:
    store, data = BundleStore(tmp_path / "kept"), [bundle(tmp_path / "function", text) for text in ("one", "two")]
    first, second = map(digest_of, data)
    assert await store.get(first) is None
    for each in data:
        await store.put(digest_of(each), in_pieces(each))
    store.forget({second})
    assert await store.get(first) == data[0], "its deployment may be in progress"
    BundleStore(tmp_path / "kept", clock=lambda: time.time() + KEPT_S + 1).forget({second})
    assert (await store.get(first), await store.get(second)) == (None, data[1])
    assert (store.renew(first), store.renew(second)) == (False, True)


async def test_a_bundle_may_be_as_large_as_the_limit_and_no_larger(tmp_path: Path) -> None:
    data = bundle(tmp_path / "function", "")
    store = BundleStore(tmp_path / "kept", BundleLimits(len(data) - 1))
    with pytest.raises(BundleError, match="the bundle has more than"):
        await store.put(digest_of(data), in_pieces(data))
    assert not store.has(digest_of(data))
    store = BundleStore(tmp_path / "kept", BundleLimits(len(data)))
    await store.put(digest_of(data), in_pieces(data))
    assert store.has(digest_of(data))


@pytest.mark.parametrize("name", ["", "../secret", "a" * 63, "A" * 64, "a" * 64 + "\n"])
async def test_what_is_no_digest_names_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.tar").write_text("")
    store = BundleStore(tmp_path / "kept")
    assert (store.has(name), await store.get(name)) == (False, None)
