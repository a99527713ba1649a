"""Packed models from a web server: only missing chunks are fetched and all are checked, despite faults of the server, the connection or the disk."""

import asyncio
import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from pilotlight.runtime.fetching import store, tries
from pilotlight.runtime.fetching.errors import FetchError
from pilotlight.runtime.fetching.listing import NAME, ListedFile, Listing, ListingError, parse_listing, write_listing
from pilotlight.runtime.fetching.remote import Remote, fetch
from pilotlight.runtime.models.sources import SourceError, directory_of, local_directory

pytestmark = pytest.mark.process

CHUNK = 1 << 16


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(store.STORE_ENV, str(tmp_path / "store"))
    monkeypatch.setattr(tries, "FIRST_PAUSE_S", 0.001)
    return tmp_path / "store"


class Server:
    """An HTTP server for a folder, with faults."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.knows_ranges = True
        self.sent: list[tuple[str, int]] = []  # (name, number of bytes) of each response
        self.fault: Callable[[str, int], str | None] = lambda name, nth: None
        self.asked = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        self.asked += 1
        fault = self.fault(name, self.asked)
        path = self.folder / name
        if fault == "round and round":
            raise web.HTTPFound(request.path)
        if fault is not None and fault.isdigit():
            return web.Response(status=int(fault))
        if not path.is_file():
            return web.Response(status=404)
        body, status = path.read_bytes(), 200
        if self.knows_ranges and (asked := request.headers.get("range")):
            start, end = asked.removeprefix("bytes=").split("-")
            body, status = body[int(start) : int(end) + 1], 206
        if fault == "wrong":
            body = bytes([body[0] ^ 1]) + body[1:]
        response = web.StreamResponse(status=status)
        response.content_length = len(body)
        await response.prepare(request)
        if fault == "hang":
            await response.write(body[: len(body) // 2])
            await asyncio.sleep(30)
        if fault == "cut":
            await response.write(body[: len(body) // 2])
            assert request.transport is not None
            request.transport.abort()
            return response
        if name != NAME:
            self.sent.append((name, len(body)))
        await response.write(body)
        return response

    def source(self, digest: str) -> str:
        return f"{self.url}#sha256={digest}"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    folder = tmp_path / "served"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "additional_chat_templates" / "tools.jinja").write_text("")
    (folder / ".hidden").write_text("no model's")
    (folder / "weights.bundle").write_bytes(random.Random(7).randbytes(5 * CHUNK + 123))
    serving = Server(folder)
    app = web.Application()
    app.router.add_get("/m/{name:.*}", serving.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    serving.url = f"http://127.0.0.1:{runner.addresses[0][1]}/m"
    yield serving
    await runner.cleanup()


def listed(folder: Path) -> str:
    return write_listing(folder, lambda done, total: None, CHUNK)


def same(there: Path, folder: Path) -> bool:
    names = ("config.json", "additional_chat_templates/tools.jinja", "weights.bundle", NAME)
    return all((there / name).read_bytes() == (folder / name).read_bytes() for name in names)


def leftovers(here: Path) -> list[str]:
    return [path.name for path in here.iterdir() if path.name.endswith((".partial", ".lock"))]


async def test_a_packed_model_comes_whole_and_is_not_asked_for_again(server: Server, here: Path) -> None:
    source = server.source(listed(server.folder))
    seen: list[tuple[int, int]] = []
    assert local_directory(source) is None
    there = await directory_of(source, lambda done, total: seen.append((done, total)))
    assert same(there, server.folder)
    assert not (there / ".hidden").exists()
    assert leftovers(here) == []
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] == 5 * CHUNK + 123 + 2
    assert sorted(seen) == seen
    asked = server.asked
    assert await directory_of(source) == local_directory(source) == there
    assert server.asked == asked, "a pinned file that is here needs no server"


async def test_a_server_without_ranges_sends_files_whole(server: Server) -> None:
    server.knows_ranges = False
    assert same(await directory_of(server.source(listed(server.folder))), server.folder)


@pytest.mark.parametrize("fault", ["cut", "wrong", "503", "429"])
@pytest.mark.parametrize("knows_ranges", [True, False])
async def test_what_breaks_off_or_is_wrong_is_asked_for_again(server: Server, fault: str, knows_ranges: bool) -> None:
    server.knows_ranges = knows_ranges
    server.fault = lambda name, nth: fault if nth % 3 == 2 else None
    assert same(await directory_of(server.source(listed(server.folder))), server.folder)


async def test_an_interrupted_fetch_continues_where_it_was(server: Server, here: Path) -> None:
    """The task is cancelled in the middle, like a killed process, and a chunk of the file is damaged as well."""
    source = server.source(listed(server.folder))
    server.fault = lambda name, nth: (
        "hang" if sum(1 for one, _ in server.sent if one == "weights.bundle") >= 3 else None
    )
    fetching = asyncio.create_task(directory_of(source))
    async with asyncio.timeout(60):
        while sum(1 for one, _ in server.sent if one == "weights.bundle") < 3:
            await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    (partial,) = leftovers(here)
    raw = bytearray((here / partial / "weights.bundle").read_bytes())
    whole = (server.folder / "weights.bundle").read_bytes()
    kept = [i for i in range(0, len(whole), CHUNK) if raw[i : i + CHUNK] == whole[i : i + CHUNK]]
    assert len(kept) >= 2
    raw[kept[0]] ^= 1
    (here / partial / "weights.bundle").write_bytes(raw)
    server.sent.clear()
    server.fault = lambda name, nth: None
    assert same(await directory_of(source), server.folder)
    assert leftovers(here) == []
    assert sum(size for name, size in server.sent if name == "weights.bundle") <= len(whole) - (len(kept) - 1) * CHUNK


async def test_a_new_version_fetches_only_its_new_chunks(server: Server) -> None:
    await directory_of(server.source(listed(server.folder)))
    raw = bytearray((server.folder / "weights.bundle").read_bytes())
    raw[2 * CHUNK] ^= 1
    (server.folder / "weights.bundle").write_bytes(raw)
    server.sent.clear()
    assert same(await directory_of(server.source(listed(server.folder))), server.folder)
    assert server.sent == [("weights.bundle", CHUNK)]


async def test_a_damaged_model_of_the_store_is_not_copied_from(server: Server) -> None:
    first = await directory_of(server.source(listed(server.folder)))
    (first / "weights.bundle").write_bytes(bytes(5 * CHUNK + 123))
    (server.folder / "config.json").write_text('{"version": 2}')
    assert same(await directory_of(server.source(listed(server.folder))), server.folder)


@pytest.mark.long
async def test_two_who_want_the_same_fetch_it_once(server: Server, here: Path) -> None:
    source = server.source(listed(server.folder))
    one, other = await asyncio.gather(directory_of(source), directory_of(source))
    assert one == other
    assert sum(size for name, size in server.sent if name == "weights.bundle") == 5 * CHUNK + 123
    assert leftovers(here) == []


async def test_a_model_larger_than_the_disk_is_refused_before_its_first_byte(server: Server, here: Path) -> None:
    chunk_bytes, digests = 1 << 30, ("0" * 64,) * 1024
    config = ListedFile("config.json", 2, (hashlib.sha256(b"{}").hexdigest(),))
    num_files = shutil.disk_usage(here.parent).free // (1 << 40) + 1
    weights = (ListedFile(f"weights-{number}", 1 << 40, digests) for number in range(num_files))
    raw = msgspec.json.encode(Listing("pilotlight-files-1", chunk_bytes, (config, *weights)))
    (server.folder / NAME).write_bytes(raw)
    needed = num_files << 20
    with pytest.raises(SourceError, match=rf"needs {needed} MiB more in .*store, where \d+ MiB are free: make room"):
        await directory_of(server.source(hashlib.sha256(raw).hexdigest()))
    assert server.sent == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
async def test_a_full_disk_is_said_with_the_arithmetic_and_costs_nothing_that_is_there(
    server: Server, here: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    source = server.source(listed(server.folder))
    written = 0
    write = os.pwrite

    def fills_up(fd: int, data: bytes, at: int) -> int:
        nonlocal written
        written += len(data)
        if written > 3 * CHUNK:
            raise OSError(code, os.strerror(code))
        return write(fd, data, at)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", fills_up)
        with pytest.raises(SourceError, match=r"store is full: .* are there; make room, and the download continues"):
            await directory_of(source)
    server.sent.clear()
    assert same(await directory_of(source), server.folder)
    assert sum(size for _, size in server.sent) < 5 * CHUNK


async def test_a_file_that_stays_wrong_is_an_error_by_name(server: Server, here: Path) -> None:
    source = server.source(listed(server.folder))
    (server.folder / "weights.bundle").write_bytes(bytes(5 * CHUNK + 123))
    with pytest.raises(
        SourceError, match=r"/m/weights.bundle, bytes \d+ to \d+: the received chunk does not match its SHA-256"
    ):
        await directory_of(source)
    (server.folder / "weights.bundle").unlink()
    with pytest.raises(SourceError, match=r"/m/weights.bundle: the server answers 404"):
        await directory_of(source)
    server.fault = lambda name, nth: "round and round"
    with pytest.raises(SourceError, match="the server redirects too often"):
        await directory_of(source)
    server.fault = lambda name, nth: "403"
    with pytest.raises(SourceError, match="answers 403; a token for it is read from PILOTLIGHT_MODELS_TOKEN"):
        await directory_of(source)
    assert local_directory(source) is None


async def test_a_pin_that_does_not_fit_is_an_error(server: Server) -> None:
    listed(server.folder)
    with pytest.raises(SourceError, match=r"is not what the site file pins: it has SHA-256 [0-9a-f]{64}"):
        await directory_of(server.source("0" * 64))


async def test_without_its_server_the_last_version_serves_on(server: Server) -> None:
    listed(server.folder)
    remote = Remote(server.url, None)  # like an https URL without a pin
    there = await fetch(remote)
    server.fault = lambda name, nth: "503"
    asked = server.asked
    assert await fetch(remote) == there
    assert server.asked == asked + 1, "a site with something to serve does not insist"
    shutil.rmtree(there)
    with pytest.raises(FetchError, match="cannot be fetched: the server answers 503"):
        await fetch(remote)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [("http://host/m", "plain http does not protect it from changes"), ("https://host/m#sha256=abc", "64 hexadecimal digits"),
     ("https://host/m#md5=abc", "64 hexadecimal digits"), ("https:///m", "write https://host/folder"),
     ("https://host/m?a=b", "write https://host/folder"), ("https://me:pw@host/m", "write https://host/folder"),
     ("https://[::1/m", "write https://host/folder"), ("https://host:x/m", "write https://host/folder"),
     ("https://host:70000/m", "write https://host/folder")],
)  # fmt: skip
def test_a_url_that_cannot_be_used_is_a_sentence(source: str, sentence: str) -> None:
    with pytest.raises(SourceError, match=sentence):
        local_directory(source)
    with pytest.raises(FetchError, match=sentence):
        Remote.parse(source)


def a_listing(**changes: Any) -> bytes:
    file = {"name": "config.json", "size": 2, "sha256": [hashlib.sha256(b"{}").hexdigest()]}
    whole = {"format": "pilotlight-files-1", "chunk_bytes": CHUNK, "files": [file | changes.pop("file", {})]}
    return json.dumps(whole | changes).encode()


def test_the_smallest_listing_is_one_file() -> None:
    assert isinstance(parse_listing(a_listing()), Listing)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"format": "other"}, "not a listing of this version"), ({"more": 1}, "not a listing of this version"),
     ({"chunk_bytes": 1}, "64 KiB to 1 GiB are allowed"), ({"chunk_bytes": 1 << 40}, "64 KiB to 1 GiB are allowed"),
     *(({"file": {"name": name}}, "cannot be called")
       for name in ("../x", "/etc/passwd", "a/../b", ".hidden", "a/.b", "", "a//b", "a\\b", "a\0b", NAME, "x" * 300, "a/b/c/d/e")),
     ({"file": {"size": -1}}, "do not match"), ({"file": {"size": CHUNK + 1}}, "do not match"), ({"file": {"sha256": []}}, "do not match"),
     ({"file": {"sha256": ["zz"]}}, "without a SHA-256"), ({"file": {"name": "model.json"}}, "no config.json"),
     ({"files": [{"name": "config.json", "size": 0, "sha256": []}] * 2}, "twice"),
     ({"files": [{"name": name, "size": 0, "sha256": []} for name in ("config.json", "config.json/x")]}, "as a file and as a folder"),
     ({"files": "x"}, "not a listing of this version")],
)  # fmt: skip
def test_a_hostile_listing_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ListingError, match=sentence):
        parse_listing(a_listing(**changes))
