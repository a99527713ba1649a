"""What reaches the client of a stream that is lost at any byte, and of a site that sends what no site should."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from edge_router.journal import MAX_HELD_BYTES, Journal
from edge_router.plain import PlainEvent
from wire.continuation import NOTHING_DELIVERED, Delivered, Mark, decode_delivery, marked
from wire.sse import DONE, HEARTBEAT, Event, EventDecoder, encode_event


@dataclass(frozen=True)
class Piece:
    """What a site writes at once: some tokens of one choice, as some events."""

    choice: int
    num_tokens: int
    num_events: int


PIECES = st.lists(st.builds(Piece, st.integers(0, 2), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=6)


def tell(pieces: list[Piece], delivered: tuple[Delivered, ...] = ()) -> bytes:
    """A site's stream: each event says how many tokens of its choice came before the piece, so that a repetition or a gap shows."""
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
        stream += marked(events, Mark(piece.choice, tuple(range(first, first + piece.num_tokens))))
    return stream


def said(events: list[Event]) -> list[bytes]:
    return [event.data for event in events if event.data is not None]


@settings(max_examples=60, deadline=None)
@given(PIECES, st.integers(1, 40))
def test_a_stream_lost_at_any_byte_is_told_once_and_whole(pieces: list[Piece], chunk: int) -> None:
    stream = tell(pieces)
    undisturbed = said(EventDecoder().feed(Journal().pass_on(EventDecoder().feed(stream))))
    assert undisturbed[-1] == DONE
    for cut in range(len(stream)):
        journal, decoder, client = Journal(), EventDecoder(), b""
        for start in range(0, cut, chunk):
            client += journal.pass_on(decoder.feed(stream[start : min(start + chunk, cut)]))
        if said(EventDecoder().feed(client))[-1:] == [DONE]:
            continue
        journal.begin_site()
        delivery = decode_delivery(journal.delivery()) if journal.delivery() else NOTHING_DELIVERED
        assert journal.num_tokens == sum(len(choice.token_ids) for choice in delivery.choices)
        client += journal.pass_on(EventDecoder().feed(tell(pieces, delivery.choices)))
        assert journal.broken is None
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
def test_nothing_of_the_side_field_and_nothing_without_a_mark_reaches_the_client(raws: list[bytes]) -> None:
    journal = Journal()
    client = journal.pass_on(EventDecoder().feed(b"".join(raws)))
    assert b":pl [" not in client
    assert (journal.broken is not None) == (b":pl [9\n\n" in raws)
    before = raws[: raws.index(b":pl [9\n\n")] if journal.broken else raws
    assert journal.num_tokens == before.count(b":pl [0,[1]]\ndata: b\n\n") == client.count(b"data: b")
    last = max((i for i, raw in enumerate(before) if b"data: b" in raw), default=-1)
    assert client.count(b"data: a") == before[: last + 1].count(b"data: a\n\n")


def test_an_event_of_a_choice_that_has_ended_does_not_pass_the_short_way_either() -> None:
    journal, more = Journal(), PlainEvent(0, (2,), 0, b"data: b\n\n")
    assert not journal.passes(more), "its choice has not begun"
    journal.pass_on(EventDecoder().feed(b':pl [0,[1],"stop",0]\ndata: a\n\n'))
    assert not journal.passes(more)
    assert (journal.num_tokens, journal.broken) == (1, None)
    journal.pass_on(EventDecoder().feed(b":pl [0,[2],null,0]\ndata: b\n\n"))
    assert "went on after its end" in str(journal.broken)


def test_a_site_that_never_marks_is_not_held_without_end() -> None:
    journal, event = Journal(), EventDecoder().feed(encode_event(b"x" * (1 << 20)))
    for _ in range(MAX_HELD_BYTES >> 20):
        assert journal.pass_on(event) == b""
    assert journal.broken is not None
    journal.begin_site()
    assert journal.broken is None
    assert journal.rest() == b""
