"""One connection to a site: an answer belongs to the request that it was given for."""

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from wire.http.client import CannotConnect, ConnectionPool, NoDescriptors, Origin, UpstreamConnection

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"


@asynccontextmanager
async def site(*answers: bytes) -> AsyncIterator[Origin]:
    """Gives each request on a connection the next of the answers."""

    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for answer in answers:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)
            ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Origin.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await ended.wait()


async def ask(connection: UpstreamConnection) -> tuple[int, bytes]:
    connection.send(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", b"")
    await connection.head()
    status, body = connection.response.status, b""
    while part := await connection.read():
        body += part
    return status, body


@pytest.mark.parametrize(
    "behind", [b"HTTP/1.1 201 Created\r\ncontent-length: 3\r\n\r\ntwo", b"HTTP/1.1 201 Cr", b"surplus"]
)
async def test_what_comes_behind_an_answer_is_nobodys(behind: bytes) -> None:
    async with asyncio.timeout(5), site(ANSWER + b"one" + behind) as origin:
        pool = ConnectionPool(connect_timeout_s=2)
        connection = await pool.connect(origin)
        assert await ask(connection) == (200, b"one")
        pool.put_back(connection)
        try:
            assert pool.idle(origin) is None
        finally:
            pool.close()


async def test_an_answer_that_ends_where_it_should_leaves_its_connection_to_the_next_request() -> None:
    early_hints = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    async with asyncio.timeout(5), site(ANSWER + b"one", early_hints + ANSWER + b"two") as origin:
        pool = ConnectionPool(connect_timeout_s=2)
        connection = await pool.connect(origin)
        assert await ask(connection) == (200, b"one")
        pool.put_back(connection)
        again = pool.idle(origin)
        assert again is connection
        assert await ask(again) == (200, b"two")
        pool.close()


async def test_a_site_that_closes_a_connection_at_once_has_not_had_the_request() -> None:
    async with asyncio.timeout(5), site() as origin:
        pool = ConnectionPool(connect_timeout_s=2)
        connection = await pool.connect(origin)
        connection.eof_received()
        with pytest.raises(CannotConnect, match="closed the connection at once"):
            connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"")
        pool.close()


async def test_a_router_without_descriptors_blames_no_site(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", connect)
    with pytest.raises(NoDescriptors, match="the router has no file descriptors left"):
        await ConnectionPool(connect_timeout_s=2).connect(Origin.of("http://127.0.0.1:1"))
