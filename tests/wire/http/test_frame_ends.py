"""Ends of frames, found in whatever pieces a stream comes; the frames are made by another implementation."""

import random

import pytest
from wsproto.frame_protocol import CloseReason, FrameProtocol

from wire.http.frame_ends import FrameEnds

SIZES = (0, 1, 125, 126, 127, 65_535, 65_536, 70_000)


def frames(is_client: bool) -> list[bytes]:
    """A message of each size, each of them once more in two fragments with a ping between them, and at last a close."""
    protocol = FrameProtocol(client=is_client, extensions=[])
    made = [protocol.send_data(b"x" * size, fin=True) for size in SIZES]
    for size in SIZES:
        made += [protocol.send_data("y" * size, fin=False), protocol.ping(b"ping"), protocol.send_data("z", fin=True)]
    return [*made, protocol.close(CloseReason.NORMAL_CLOSURE, "done")]


@pytest.mark.parametrize("is_client", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("largest", [1, 3, 1000, 1 << 20])
def test_ends_are_where_frames_end_however_the_stream_is_cut(is_client: bool, largest: int) -> None:
    chance, made = random.Random(largest), frames(is_client)
    stream, ends, expected = b"".join(made), [], []
    for frame in made:
        expected.append((expected[-1] if expected else 0) + len(frame))
    found, at = FrameEnds(), 0
    while at < len(stream):
        piece = stream[at : at + chance.randint(1, largest)]
        assert not found.has_close or at > expected[-2]
        while piece:
            taken = found.feed(piece, to_end=True)
            at, piece = at + taken, piece[taken:]
            if found.is_between:
                ends.append(at)
    assert ends == expected
    assert found.has_close


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_without_a_wish_for_an_end_all_is_looked_at(size: int) -> None:
    *made, close = frames(False)
    stream = b"".join(made)
    found = FrameEnds()
    for at in range(0, len(stream), size):
        piece = stream[at : at + size]
        assert found.feed(piece) == len(piece)
    assert found.is_between
    assert not found.has_close
    found.feed(close[:1])
    assert not found.is_between
