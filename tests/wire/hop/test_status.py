"""A site's status round-trips, and anything else is refused."""

import msgspec
import pytest

from pilotlight.wire.hop.status import ModelStatus, Place, ProcessStatus, SiteStatus, decode_status, encode_status

STATUS = SiteStatus(
    site="ams1", version="0.1.0", place=Place("Amsterdam", 52.31, 4.76), sequence=3, ready=True, draining=False,
    inflight=1, max_inflight=8, models=(ModelStatus("ember", "device", running=1),),
    processes=(ProcessStatus("site", 10, "ams1", "http://127.0.0.1:1"),),
)  # fmt: skip


def test_a_status_round_trips() -> None:
    assert decode_status(encode_status(STATUS)) == STATUS


def test_a_newer_site_may_publish_more() -> None:
    assert decode_status(encode_status(STATUS).replace(b'"ready"', b'"temperature":20,"ready"')) == STATUS


@pytest.mark.parametrize("body", [b"", b"{}", b"null", b"[1]", encode_status(STATUS).replace(b"true", b"3")])
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_status(body)
