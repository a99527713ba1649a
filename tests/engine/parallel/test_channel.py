"""A channel reports unread messages, and that its other end is gone, whatever its descriptor's number."""

import fcntl
import socket

from pilotlight.engine.parallel.channel import RankChannel

MANY = 2000  # a host with many open files gives such a number to its next one


def test_a_channel_is_gone_when_its_other_end_is_closed() -> None:
    ours, end = RankChannel.pair()
    theirs = RankChannel(end)
    theirs.send("a message")
    assert not ours.is_gone
    theirs.close()
    assert ours.is_gone
    assert ours.receive() == "a message"
    ours.close()


def test_a_message_is_noticed_on_a_descriptor_of_a_high_number() -> None:
    low, end = socket.socketpair()
    ours = RankChannel.inherited(fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, MANY))
    low.close()
    theirs = RankChannel(end)
    assert not ours.has_message()
    theirs.send("a message")
    assert ours.has_message()
    assert not ours.is_gone
    assert ours.receive() == "a message"
    theirs.close()
    assert ours.has_message(), "its end is read without waiting"
    assert ours.is_gone
    ours.close()
