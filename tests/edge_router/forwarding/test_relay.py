"""The bytes that reach a client if its stream is lost at any byte, or if a site sends invalid events."""

from dataclasses import dataclass

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.edge_router.forwarding.relay import (
    MAX_HELD_BYTES,
    DeliveryLog,
    Forward,
    RelayEvent,
    SiteDraining,
    StreamBroken,
    StreamDone,
    StreamRelay,
    error_of,
)
from pilotlight.wire.hop.continuation import (
    DRAIN_NOTICE,
    NOTHING_DELIVERED,
    ContinuationError,
    Delivered,
    Delivery,
    ResumePoint,
    decode_delivery,
    strip_resume_point,
    with_resume_point,
)
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.sse import DONE, HEARTBEAT, Event, EventDecoder, encode_event


@dataclass(frozen=True)
class Piece:
    """The part of a stream that a site writes at once: tokens of one choice, in some events."""

    choice: int
    num_tokens: int
    num_events: int


PIECES = st.lists(st.builds(Piece, st.integers(0, 2), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=6)


def tell(pieces: list[Piece], delivered: tuple[Delivered, ...] = ()) -> bytes:
    """Return a site's stream.

    Each event has its choice and the number of that choice's earlier tokens, so that repeated and missing events are found.
    """
    skipped = {choice: len(has.token_ids) for choice, has in enumerate(delivered)}
    position = dict.fromkeys(range(3), 0)
    stream = HEARTBEAT
    for number, piece in enumerate(pieces):
        first = position[piece.choice]
        position[piece.choice] += piece.num_tokens
        if position[piece.choice] <= skipped.get(piece.choice, 0):
            continue
        events = b"".join(encode_event(b"%d:%d:%d" % (piece.choice, first, i)) for i in range(piece.num_events))
        if number == len(pieces) - 1:
            events += encode_event(DONE)
        stream += with_resume_point(events, ResumePoint(piece.choice, tuple(range(first, first + piece.num_tokens))))
    return stream


def said(events: list[Event]) -> list[bytes]:
    return [event.data for event in events if event.data is not None]


def relayed(log: DeliveryLog, stream: bytes, chunk: int | None = None) -> tuple[bytes, list[RelayEvent]]:
    """Feed a site's stream in pieces of `chunk` bytes; return the bytes for the client, and all other events."""
    relay, client, others = StreamRelay(log, is_resumable=True), b"", list[RelayEvent]()
    step = chunk or max(1, len(stream))
    for start in range(0, len(stream), step):
        for event in relay.feed(stream[start : start + step]):
            if isinstance(event, Forward):
                client += event.data
            else:
                others.append(event)
        if others and isinstance(others[-1], StreamBroken):
            break
    return client, others


def delivered(log: DeliveryLog) -> Delivery:
    return decode_delivery(log.delivery()) if log.delivery() else NOTHING_DELIVERED


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(PIECES, st.integers(1, 40))
def test_a_stream_lost_at_any_byte_is_delivered_once_and_whole(pieces: list[Piece], chunk: int) -> None:
    stream = tell(pieces)
    undisturbed = said(EventDecoder().feed(relayed(DeliveryLog(), stream)[0]))
    assert undisturbed[-1] == DONE
    for cut in range(len(stream)):
        log = DeliveryLog()
        client, _ = relayed(log, stream[:cut], chunk)
        if said(EventDecoder().feed(client))[-1:] == [DONE]:
            continue
        delivery = delivered(log)
        assert log.num_tokens == sum(len(choice.token_ids) for choice in delivery.choices)
        further, others = relayed(log, tell(pieces, delivery.choices))
        client += further
        assert others == [StreamDone()]
        assert b":pl" not in client
        heard = said(EventDecoder().feed(client))
        assert sorted(heard) == sorted(undisturbed)
        for choice in (b"0:", b"1:", b"2:"):
            mine = [item for item in heard if item.startswith(choice)]
            assert mine == [item for item in undisturbed if item.startswith(choice)]


@given(
    st.lists(
        st.sampled_from(
            [b"data: a\n\n", b": note\n\n", b":pl [0,[1]]\ndata: b\n\n", b":pl [9\n\n", b":pl x\n\n", b"id: 1\n\n"]
        )
    )
)
def test_nothing_of_the_side_field_and_nothing_without_a_resume_point_reaches_the_client(raws: list[bytes]) -> None:
    log = DeliveryLog()
    client, others = relayed(log, b"".join(raws))
    assert b":pl [" not in client
    assert bool(others) == (b":pl [9\n\n" in raws)
    before = raws[: raws.index(b":pl [9\n\n")] if others else raws
    assert log.num_tokens == before.count(b":pl [0,[1]]\ndata: b\n\n") == client.count(b"data: b")
    last = max((i for i, raw in enumerate(before) if b"data: b" in raw), default=-1)
    assert client.count(b"data: a") == before[: last + 1].count(b"data: a\n\n")


def test_an_answer_that_is_recorded_keeps_its_resume_points_with_its_events() -> None:
    log, event = DeliveryLog(is_recorded=True), encode_event(b"1")
    stream = event + with_resume_point(event, ResumePoint(0, (7,)))
    assert StreamRelay(log, is_resumable=True).feed(stream) == [Forward(stream)]
    again = DeliveryLog()
    for raw in EventDecoder().split(stream):
        if (point := strip_resume_point(raw)[1]) is not None:
            again.add(point)
    assert again.delivery() == log.delivery()


def test_an_answer_too_long_to_be_handed_to_another_site_is_not_continued() -> None:
    def delivery(*limit: int) -> bytes:
        log = DeliveryLog(*limit)
        log.add(ResumePoint(0, (1000,) * 100))
        return log.delivery()

    size = len(delivery())
    assert len(delivery(size)) == size
    with pytest.raises(ContinuationError, match="too long to be continued: 100 tokens"):
        delivery(size - 1)


def test_a_choice_that_has_ended_does_not_continue() -> None:
    log = DeliveryLog()
    client, others = relayed(log, b':pl [0,[1],"stop",0]\ndata: a\n\n:pl [0,[2],null,0]\ndata: b\n\n')
    assert client == b"data: a\n\n"
    (broken,) = others
    assert isinstance(broken, StreamBroken)
    assert broken.cause == "malformed"
    assert "continued after its end" in broken.detail
    assert log.num_tokens == 1


def test_the_work_of_all_sites_counts_and_what_they_count_alike_counts_once() -> None:
    log = DeliveryLog()
    for tokens in ((1,), (2,)):
        log.add(ResumePoint(0, tokens, None, 3, prompt_tokens=7, drafted_tokens=5, accepted_tokens=4, device_us=100))
    log.leave_site()
    assert log.used == ResourceUse(7, 3, 2, 0, 5, 4, 100)
    log.add(ResumePoint(0, (3,), None, 3, prompt_tokens=7, drafted_tokens=2, accepted_tokens=1, device_us=30))
    assert log.used == ResourceUse(7, 3, 3, 0, 7, 5, 130)


def test_the_work_of_a_site_counts_once_where_its_stream_could_move_and_stays() -> None:
    log = DeliveryLog()
    for token, work in enumerate((5, 7)):
        log.add(ResumePoint(0, (token,), drafted_tokens=work, accepted_tokens=work, device_us=work))
        assert log.delivery()
    assert log.used == ResourceUse(output=2, drafted=7, accepted=7, device_us=7)


def test_a_site_that_never_sends_a_resume_point_is_not_held_without_end() -> None:
    log, event = DeliveryLog(), encode_event(b"x" * (1 << 20))
    client, others = relayed(log, event * (MAX_HELD_BYTES >> 20), len(event))
    assert client == b""
    assert [type(each) for each in others] == [StreamBroken]
    assert relayed(log, b":pl [0,[1]]\ndata: a\n\n") == (b"data: a\n\n", []), "the next site begins without held events"


def test_a_site_that_drains_says_so_with_all_that_follows_but_for_its_end() -> None:
    relay = StreamRelay(DeliveryLog(), is_resumable=True)
    point = b":pl [0,[1]]\ndata: a\n\n"
    assert relay.feed(DRAIN_NOTICE) == [SiteDraining()]
    assert relay.feed(point) == [Forward(b"data: a\n\n"), SiteDraining()]
    assert relay.feed(encode_event(DONE)) == [Forward(encode_event(DONE)), StreamDone()]


def test_an_error_at_the_end_is_the_clients_to_read_unless_it_is_the_sites_own() -> None:
    for code, is_sites_own in (
        ("invalid_request", False),
        ("request_failed", False),
        ("engine_error", True),
        (3040, True),
        (3036, False),
    ):
        error = encode_event(orjson.dumps({"errors": [{"code": code, "message": "m"}]}))
        relay = StreamRelay(DeliveryLog(), is_resumable=True)
        assert relay.feed(b":pl [0,[1]]\ndata: a\n\n" + error) == [Forward(b"data: a\n\n")]
        (first, *rest) = relay.end()
        if is_sites_own:
            assert isinstance(first, StreamBroken)
            assert first.cause == "error"
            assert not rest
        else:
            assert [first, *rest] == [Forward(error), StreamDone()]


@pytest.mark.parametrize("stream", [b"", b": note\n\n", b"data: a\n\n", b"data: a", b"data: [DONE]\n\ndata: b\n\n"])
@pytest.mark.parametrize("is_resumable", [True, False])
def test_a_body_that_ends_before_the_stream_does_has_broken_it(stream: bytes, is_resumable: bool) -> None:
    relay = StreamRelay(DeliveryLog(), is_resumable=is_resumable)
    relay.feed(stream)
    (broken,) = relay.end()
    assert isinstance(broken, StreamBroken)
    assert broken.cause == "closed"


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"error": {"code": "a"}}', {"code": "a"}),
        (b'{"type": "error", "error": {"type": "a"}}', {"type": "a"}),
        (b'{"type": "error", "code": "a"}', {"type": "error", "code": "a"}),
        (b'{"errors": [{"code": 1}, {"code": 2}], "error": {"code": 3}}', {"code": 1}),
        (b'{"errors": [], "error": {"code": 3}}', {"code": 3}),
        (b'{"errors": {"code": 1}}', {}),
        (b'{"errors": ["code"]}', {}),
        (b'{"error": "text"}', {"message": "text", "code": None}),
        (b'{"type": "message", "code": "a"}', {}),
        (b'["error"]', {}),
        (b"", {}),
        (b"{", {}),
    ],
)  # fmt: skip
def test_every_dialects_error_is_found_and_nothing_else_is_one(body: bytes, error: dict[str, object]) -> None:
    assert error_of(body) == error


def test_an_answer_has_started_with_its_first_event_that_is_no_comment() -> None:
    for is_resumable in (True, False):
        relay = StreamRelay(DeliveryLog(), is_resumable=is_resumable)
        assert (relay.has_data, relay.num_events) == (False, 0)
        relay.feed(HEARTBEAT + b"id: 1\n\n" + b"data")
        assert (relay.has_data, relay.num_events) == (False, 2)
        relay.feed(b": a\n\n")
        assert (relay.has_data, relay.num_events) == (True, 3)
