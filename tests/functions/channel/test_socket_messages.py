"""WebSocket messages on a channel: encoded and decoded, however the bytes are split; invalid ones are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.functions.channel.socket_messages import (
    MessageDecoder,
    MessageError,
    MessageTooLarge,
    SocketClose,
    encode,
)

MESSAGES = st.one_of(
    st.text(max_size=50), st.binary(max_size=50), st.builds(SocketClose, st.integers(0, 65535), st.text(max_size=30))
)


@given(st.lists(MESSAGES, max_size=6), st.lists(st.integers(0, 600), max_size=8))
def test_messages_survive_any_cut(messages: list[str | bytes | SocketClose], cuts: list[int]) -> None:
    data = b"".join(encode(message) for message in messages)
    decoder, found, start = MessageDecoder(1000), [], 0
    for end in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        found += list(decoder.feed(data[start:end]))
        start = end
    assert found == messages


def test_what_is_too_large_is_refused_before_it_has_come() -> None:
    assert list(MessageDecoder(10).feed(encode("x" * 10))) == ["x" * 10]
    with pytest.raises(MessageTooLarge):
        list(MessageDecoder(10).feed(encode("x" * 11)[:5]))


@pytest.mark.parametrize("data", [b"\0" + bytes(4), b"\3" + bytes(4), b"\1\0\0\0\1\xff", b"\3\0\0\0\3\0\0\xff"])
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        list(MessageDecoder(1000).feed(data))
