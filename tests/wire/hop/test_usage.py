"""Usage reports of sites round-trip, also with routers and sites of other versions."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.wire.hop.continuation import ResumePoint, strip_resume_point, with_resume_point
from pilotlight.wire.hop.usage import ResourceUse, decode_use, encode_use

COUNTS = st.integers(0, 10**15 - 1)


@given(st.builds(ResourceUse, *[COUNTS] * 7))
def test_use_is_read_as_it_was_written(use: ResourceUse) -> None:
    assert decode_use(*encode_use(use)) == use
    assert decode_use(encode_use(use)[0], "") == ResourceUse(*use[:4]), "older sites send only four counts"


@pytest.mark.parametrize(
    "value", ["", "1,2,3", "1,2,3,4,5", "1,2,3,-4", "1,2,3,x", "1,2,3," + "9" * 16, "1,2,3,\N{SUPERSCRIPT TWO}"]
)
def test_what_is_no_use_is_none(value: str) -> None:
    assert decode_use(value, "1,2,3") is None
    assert decode_use("1,2,3,4", value.removesuffix(",3")) in (ResourceUse(1, 2, 3, 4), None)


def test_resume_points_of_other_versions_are_understood() -> None:
    """Older sites send fewer fields. A router ignores fields that it does not know."""
    newer = b":pl [0,[7],null,1,2,3,4,5,6,7,8,9]\ndata: x\n\n"
    assert strip_resume_point(newer)[1] == ResumePoint(0, (7,), None, 1, 2, 3, 4, 5, 6, 7)
    older = b":pl [0,[7],null,1,2,3,4]\ndata: x\n\n"
    assert strip_resume_point(older)[1] == ResumePoint(0, (7,), None, 1, 2, 3, 4)
    line = with_resume_point(b"data: x\n\n", ResumePoint(0, (7,), drafted_tokens=5, device_us=6)).split(b"\n")[0]
    assert msgspec.json.decode(line[4:])[7:] == [5, 0, 6]
