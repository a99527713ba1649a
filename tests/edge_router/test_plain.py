"""The shorter way of usual events gives what the ordinary one gives, and leaves to it everything else."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_router.journal import Journal
from edge_router.link import Link, Origin
from edge_router.plain import PlainEvent
from wire.continuation import unmarked
from wire.sse import EventDecoder

EVENT = b':pl [0,[7],null,3]\nid: 1\ndata: {"x":1}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
ODD = [
    b":pl [0,[7],null,3]\ndata: [DONE]\n\n", b':pl [0,[7],"stop",3]\ndata: x\n\n', b":pl [0,[],null,0]\ndata: x\n\n", b"data: x\n\n", b": note\n\n",
    b":pl [0,[7],null,3]\nid: 1\n\n", b":pl [0,[7],null,3]\ndata: x\n\ndata: y\n\n", b":pl [0,[7],null,3]\r\ndata: x\r\n\r\n", b":pl draining\n\n",
    b":pl [0,[07],null,3]\ndata: x\n\n", b":pl [0,[2147483648],null,3]\ndata: x\n\n", b":pl [9,[7],null,3]\ndata: x\n\n",
    b":pl [0,[7],null,3]\ndata: x\n", b":pl [0,[7],null,3]\ndata:x\n\n", b":pl [0, [7],null,3]\ndata: x\n\n",
]  # fmt: skip
EVENTS = st.lists(st.sampled_from([EVENT, EVENT, b":pl [1,[1,2,3],null,0]\nevent: e\ndata: y\n\n", *ODD]), max_size=8)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize("event", ODD)
def test_what_is_not_usual_is_left_to_the_ordinary_way(event: bytes) -> None:
    found = PlainEvent.of(chunk(event))
    assert found is None or found.choice == 9, "a choice that has not begun is the journal's to refuse"


@pytest.mark.parametrize(
    "read",
    [chunk(EVENT)[:-1], chunk(EVENT) + b"0", b"0x" + chunk(EVENT), b"1" + chunk(EVENT), chunk(EVENT) * 2, EVENT, b"",
     chunk(EVENT).replace(b"\r\n", b"\n")],
)  # fmt: skip
def test_a_read_that_is_not_one_whole_chunk_is_left_to_the_parser(read: bytes) -> None:
    assert PlainEvent.of(read) is None


@given(st.integers(0, 1023), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), st.integers(0, 10**9))
def test_a_usual_event_says_what_its_mark_says(choice: int, tokens: list[int], cached: int) -> None:
    event = b':pl [%d,[%s],null,%d]\nid: 4\ndata: {"a":"b"}\n\n' % (choice, ",".join(map(str, tokens)).encode(), cached)
    found = PlainEvent.of(chunk(event))
    raw, mark = unmarked(event)
    assert found is not None
    assert mark is not None
    assert (found.choice, found.token_ids, found.cached_tokens, found.told) == (
        mark.choice,
        mark.token_ids,
        mark.cached_tokens,
        raw,
    )


@settings(max_examples=300)
@given(EVENTS)
@example([EVENT, ODD[2], EVENT, ODD[1], EVENT])
@example([b"data: first\n\n", EVENT, ODD[8], EVENT])
def test_a_journal_is_the_same_whether_usual_events_are_read_or_passed(events: list[bytes]) -> None:
    plain, ordinary = Journal(), Journal()
    told = heard = b""
    for event in events:
        heard += ordinary.pass_on(EventDecoder().feed(event))
        usual = PlainEvent.of(chunk(event))
        if usual is not None and plain.passes(usual):
            told += usual.told
        else:
            told += plain.pass_on(EventDecoder().feed(event))
        assert told == heard
        assert (plain.num_tokens, plain.last_words, plain.site_is_draining) == (
            ordinary.num_tokens,
            ordinary.last_words,
            ordinary.site_is_draining,
        )
        if plain.broken or ordinary.broken:
            assert str(plain.broken) == str(ordinary.broken)
            return
    assert plain.delivery() == ordinary.delivery()


class _Transport(asyncio.Transport):
    def write(self, data: Any) -> None: ...

    def abort(self) -> None: ...

    def is_closing(self) -> bool:
        return False


async def _heard(reads: list[bytes], *, is_plain: bool) -> tuple[bytes, int, bool]:
    """What comes out of a link, how much of it by the shorter way, and whether the answer has ended."""
    link = Link(Origin.of("http://site"))
    link.connection_made(_Transport())
    link.send(b"", b"")
    got: list[bytes] = []
    shorter: list[bytes] = []

    def plain(read: bytes) -> bool:
        if (event := PlainEvent.of(read)) is None:
            return False
        shorter.append(event.told)
        got.append(read[read.index(b"\n") + 1 : -2])
        return True

    link.sink = got.append
    link.plain = plain if is_plain else None
    waiting = asyncio.ensure_future(link.news())
    await asyncio.sleep(0)
    for read in reads:
        link.data_received(read)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if waiting.done():
            if not link.has_head or link.is_done or waiting.exception() is not None:
                break
            if link.has_parts:
                got.append(link.take())
            waiting = asyncio.ensure_future(link.news())
            await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return b"".join([*got, link.take()]), len(shorter), link.is_done


@settings(max_examples=150, deadline=None)
@given(
    EVENTS,
    st.lists(st.integers(0, 600), max_size=6),
    st.sampled_from([b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"", b"5\r\nab"]),
)
def test_a_link_gives_the_same_bytes_by_either_way_however_they_are_cut(
    events: list[bytes], at: list[int], end: bytes
) -> None:
    whole = HEAD + b"".join(map(chunk, events)) + end
    cuts = sorted({0, len(whole), *(min(i, len(whole)) for i in at)})
    by_chunk = [HEAD, *map(chunk, events), *([end] if end else [])]
    for reads in (by_chunk, [whole[a:b] for a, b in pairwise(cuts)]):
        ordinary = asyncio.run(_heard(reads, is_plain=False))
        shorter = asyncio.run(_heard(reads, is_plain=True))
        assert (shorter[0], shorter[2]) == (ordinary[0], ordinary[2])


def test_most_events_take_the_shorter_way() -> None:
    body, shorter, is_done = asyncio.run(
        _heard([HEAD + chunk(EVENT), chunk(EVENT), chunk(EVENT), b"0\r\n\r\n"], is_plain=True)
    )
    assert (body, shorter, is_done) == (EVENT * 3, 2, True)
