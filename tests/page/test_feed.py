"""The page's feed: a new page gets the complete state first, then only changes."""

import asyncio
from typing import Any

import msgspec
import orjson

from pilotlight.page.feed import Feed
from pilotlight.page.source import Decision, Move
from tests.page.fakes import ToldSource, counts, row


def decoded(event: bytes) -> tuple[str, dict[str, Any]]:
    fields = dict(line.split(b": ", 1) for line in event.strip().split(b"\n"))
    return fields[b"event"].decode(), orjson.loads(fields[b"data"])


async def test_a_newcomer_sees_everything_and_then_changes() -> None:
    source = ToldSource([row("ams1"), row("iad1")])
    feed = Feed(source)
    feed.tick()
    events = feed.events()
    kind, whole = decoded(await anext(events))
    assert kind == "whole"
    assert [site["name"] for site in whole["sites"]] == ["ams1", "iad1"]
    assert (whole["name"], whole["place"]["city"]) == ("router", "Amsterdam")

    source.rows = (msgspec.structs.replace(source.rows[0], state="unhealthy"), source.rows[1])
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    feed.tick()
    kind, second = decoded(await waiting)
    assert kind == "second"
    assert [(site["name"], site["state"]) for site in second["sites"]] == [("ams1", "unhealthy")]

    source.rows = source.rows[1:]
    waiting = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    feed.tick()
    assert decoded(await waiting)[1]["gone"] == ["ams1"]


async def test_a_page_that_missed_a_second_gets_a_whole_picture_for_changes_are_written_once() -> None:
    source = ToldSource([row("ams1"), row("iad1")])
    feed = Feed(source)
    feed.tick()
    events = feed.events()
    await anext(events)
    source.rows = (msgspec.structs.replace(source.rows[0], state="unhealthy"), source.rows[1])
    feed.tick()  # the page has not read the previous event yet
    kinds, states = [], []
    for _ in range(2):
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        feed.tick()
        kind, told = decoded(await waiting)
        kinds.append(kind)
        states.append({site["name"]: site["state"] for site in told["sites"]})
    assert (kinds, states) == (["whole", "second"], [{"ams1": "unhealthy", "iad1": "healthy"}, {}])


async def test_moves_and_decisions_are_sent_once_and_a_newcomer_gets_the_newest() -> None:
    source = ToldSource([row("ams1")])
    feed = Feed(source)
    feed.tick()
    source.all_moves = (Move(1, "ams1", "iad1", "closed", 20.0), Move(2, "ams1", "sin1", "closed", 30.0))
    source.all_decisions = (Decision(1, "ams1", "home", {"rtt": 1.0}, 1.0, 2.0),)
    first = feed.events()
    await anext(first)
    told = []
    for _ in range(2):
        waiting = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        feed.tick()
        told.append(decoded(await waiting)[1])
    assert [[move["number"] for move in one["moves"]] for one in told] == [[1, 2], []]
    assert [len(one["decisions"]) for one in told] == [1, 0]
    assert len(decoded(await anext(feed.events()))[1]["moves"]) == 2


async def test_a_second_is_encoded_once_however_many_pages_are_open() -> None:
    source = ToldSource([row("ams1")])
    feed = Feed(source)
    feed.tick()
    pages = [feed.events() for _ in range(10)]
    for page in pages:
        await anext(page)
    waiting = [asyncio.ensure_future(anext(page)) for page in pages]
    await asyncio.sleep(0)
    source.told = counts(tokens=10)
    feed.tick()
    events = await asyncio.gather(*waiting)
    assert len({id(event) for event in events}) == 1


async def test_many_sites_rows_are_written_less_often() -> None:
    source = ToldSource([row(f"s{i}") for i in range(330)])
    feed = Feed(source)
    sizes = []
    for second in range(9):
        source.rows = tuple(msgspec.structs.replace(one, inflight=second) for one in source.rows)
        events = feed.events()
        await anext(events)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        feed.tick()
        sizes.append(len(decoded(await waiting)[1]["sites"]))
    assert sorted(sizes) == [0, 0, 0, 0, 0, 0, 330, 330, 330]
