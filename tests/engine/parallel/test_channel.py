"""A channel reports that its other end is gone, also while messages are unread."""

from pilotlight.engine.parallel.channel import RankChannel


def test_a_channel_is_gone_when_its_other_end_is_closed() -> None:
    ours, end = RankChannel.pair()
    theirs = RankChannel(end)
    theirs.send("a message")
    assert not ours.is_gone
    theirs.close()
    assert ours.is_gone
    assert ours.receive() == "a message"
    ours.close()
