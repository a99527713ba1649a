"""Links to sites: one is ready before it is asked for, and nobody hears of those that could not be had."""

import asyncio
from contextlib import suppress

from edge_router.link import Link, LinkPool, Origin


async def _listening() -> tuple[asyncio.Server, Origin]:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    return server, Origin.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def _until_open(pool: LinkPool, count: int) -> None:
    async with asyncio.timeout(5):
        while pool.num_open < count:
            await asyncio.sleep(0.005)


async def test_where_the_last_link_was_taken_another_is_opened_for_whoever_comes_next() -> None:
    server, origin = await _listening()
    pool = LinkPool(5.0)
    first = await pool.connect(origin, Link)
    pool.put_back(first)
    assert pool.idle(origin) is first
    await _until_open(pool, 2)
    await asyncio.sleep(0)
    second = pool.idle(origin)
    assert second is not None
    assert second is not first
    await _until_open(pool, 3)
    pool.put_back(first)
    pool.put_back(second)
    assert pool.idle(origin) is second
    await asyncio.sleep(0.05)
    assert pool.num_open == 3, "there were others left"
    pool.close()
    server.close()
    await asyncio.sleep(0.1)


async def test_a_link_that_could_not_be_opened_ahead_is_nobodys_affair() -> None:
    server, origin = await _listening()
    pool = LinkPool(5.0)
    pool.put_back(await pool.connect(origin, Link))
    server.close()
    assert pool.idle(origin) is not None
    await asyncio.sleep(0.05)
    assert pool.num_open == 1
    assert pool.idle(origin) is None
    pool.close()
    await asyncio.sleep(0.1)
