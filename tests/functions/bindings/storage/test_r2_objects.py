"""R2's rules without I/O: conditions, ranges, parts, and conversion to and from S3's headers."""

import hashlib
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.functions.bindings.storage.r2_headers import MAX_META_BYTES, OURS, described, head_of, listed, time_of
from pilotlight.functions.bindings.storage.r2_objects import (
    MIN_PART_BYTES,
    Conditions,
    Details,
    Digests,
    HttpMetadata,
    ObjectHead,
    R2Error,
    Range,
    UploadedPart,
    chosen_parts,
    decoded_cursor,
    multipart_etag,
)

HEAD = ObjectHead("k", "v", 10, "ab", 5_500, Details(), {})


@pytest.mark.parametrize(
    ("conditions", "holds", "holds_of_nothing"),
    [
        ({}, True, True),
        ({"etag_matches": ["x", '"ab"']}, True, False),
        ({"etag_matches": ["*"]}, True, False),
        ({"etag_matches": ["a"]}, False, False),
        ({"etag_does_not_match": ["ab"]}, False, True),
        ({"etag_does_not_match": ["*"]}, False, True),
        ({"etag_does_not_match": ["x"]}, True, True),
        ({"uploaded_before_ms": 5_501}, True, True),
        ({"uploaded_before_ms": 5_500}, False, True),
        ({"uploaded_after_ms": 5_499}, True, True),
        ({"uploaded_after_ms": 5_500}, False, True),
        ({"uploaded_before_ms": 5_001, "seconds_granularity": True}, True, True),
        ({"uploaded_before_ms": 5_000, "seconds_granularity": True}, False, True),
        ({"uploaded_after_ms": 5_000, "seconds_granularity": True}, False, True),
        ({"etag_matches": ["ab"], "uploaded_before_ms": 1}, True, False),  # RFC 9110 section 13.2.2: the etag decides
        ({"etag_does_not_match": ["x"], "uploaded_after_ms": 9_999}, True, True),
        ({"etag_matches": ["ab"], "etag_does_not_match": ["ab"]}, False, False),
        ({"etag_matches": []}, False, False),
    ],
)
def test_a_condition_is_of_the_etag_first_and_of_the_time_otherwise(
    conditions: dict[str, Any], holds: bool, holds_of_nothing: bool
) -> None:
    wanted = Conditions(**conditions)
    assert (wanted.hold(HEAD), wanted.hold(None)) == (holds, holds_of_nothing)


@pytest.mark.parametrize(
    ("wanted", "size", "part"),
    [
        ({}, 10, (0, 10)),
        ({}, 0, (0, 0)),
        ({"offset": 9}, 10, (9, 1)),
        ({"offset": 10}, 10, None),
        ({"offset": 0}, 0, (0, 0)),
        ({"offset": 1}, 0, None),
        ({"length": 3}, 10, (0, 3)),
        ({"offset": 8, "length": 3}, 10, (8, 2)),
        ({"length": 0}, 10, None),
        ({"suffix": 10}, 10, (0, 10)),
        ({"suffix": 11}, 10, (0, 10)),
        ({"suffix": 1, "length": 1}, 10, None),
    ],
)
def test_a_range_is_the_part_of_it_that_is_there(
    wanted: dict[str, int], size: int, part: tuple[int, int] | None
) -> None:
    if part is None:
        with pytest.raises(R2Error) as refused:
            Range(**wanted).within(size)
        assert (refused.value.number, refused.value.status) == (10039, 416)
    else:
        assert Range(**wanted).within(size) == part


ETAGS = tuple(hashlib.md5(bytes([i])).hexdigest() for i in range(4))


@pytest.mark.parametrize(
    ("parts", "sizes", "number"),
    [
        ([1, 2, 3], {1: MIN_PART_BYTES, 2: MIN_PART_BYTES, 3: 1}, None),
        ([3, 1], {1: MIN_PART_BYTES, 2: 7, 3: MIN_PART_BYTES}, None),
        ([1], {1: 1}, None),
        ([1, 2], {1: MIN_PART_BYTES, 2: MIN_PART_BYTES}, None),
        ([1, 2], {1: MIN_PART_BYTES, 2: MIN_PART_BYTES + 1}, 10048),
        ([1, 2, 3], {1: MIN_PART_BYTES, 2: MIN_PART_BYTES + 1, 3: 1}, 10048),
        ([1, 2], {1: MIN_PART_BYTES - 1, 2: 1}, 10011),
        ([], {}, 10025),
        ([1, 1], {1: MIN_PART_BYTES}, 10025),
        ([1, 2], {1: MIN_PART_BYTES}, 10025),
    ],
)
def test_parts_fit_together_by_r2s_rules(parts: list[int], sizes: dict[int, int], number: int | None) -> None:
    uploaded = {part: (ETAGS[part], size) for part, size in sizes.items()}
    wanted = [UploadedPart(part, f'"{ETAGS[part]}"') for part in parts]
    if number is None:
        assert chosen_parts(wanted, uploaded) == sorted(parts)
        with pytest.raises(R2Error, match="could not be found"):
            chosen_parts([UploadedPart(parts[0], ETAGS[0])], uploaded)
    else:
        with pytest.raises(R2Error) as refused:
            chosen_parts(wanted, uploaded)
        assert refused.value.number == number


def test_an_etag_of_parts_is_that_of_their_digests_and_says_how_many() -> None:
    joined = b"".join(bytes.fromhex(etag) for etag in ETAGS[:2])
    assert multipart_etag(ETAGS[:2]) == f"{hashlib.md5(joined).hexdigest()}-2"


def test_a_checksum_is_checked_when_all_has_passed_and_its_length_before() -> None:
    right = hashlib.sha256(b"ab").digest()
    for expected, is_right in ((right, True), (bytes(32), False)):
        digests = Digests(("sha256", expected))
        digests.update(b"a")
        digests.update(b"b")
        if is_right:
            assert digests.checked() == {"md5": hashlib.md5(b"ab").digest(), "sha256": right}
        else:
            with pytest.raises(R2Error, match="did not match") as refused:
                digests.checked()
            assert refused.value.number == 10037
    for wrong in (("sha256", right[1:]), ("crc32", b"1234")):
        with pytest.raises(R2Error):
            Digests(wrong)
    assert set(Digests(None).checked()) == {"md5"}


@pytest.mark.parametrize("cursor", ["=", "a", "é", "a b="])
def test_a_cursor_that_no_list_has_given_is_refused(cursor: str) -> None:
    with pytest.raises(R2Error) as refused:
        decoded_cursor(cursor)
    assert refused.value.number == 10022


TEXTS = st.text(max_size=12)
WORDS = st.none() | TEXTS | st.sampled_from(["text/plain", "binary/octet-stream", "application/octet-stream"])
DETAILS = st.builds(
    Details,
    st.builds(
        HttpMetadata,
        content_type=WORDS,
        content_language=WORDS,
        content_disposition=WORDS,
        content_encoding=WORDS,
        cache_control=WORDS,
        cache_expiry_ms=st.none() | st.integers(0, 4_000_000_000_999),
    ),
    st.dictionaries(st.sampled_from(["a", "a-b", "A", "é", "pilotlight", ""]), TEXTS, max_size=3),
    st.sampled_from(["Standard", "InfrequentAccess"]),
)


def answer(headers: dict[str, str]) -> Any:
    return cast(Any, SimpleNamespace(headers=headers))


@given(DETAILS)
def test_an_object_comes_back_from_s3_as_it_was_described(details: Details) -> None:
    checksums = {"sha1": bytes(range(20))}
    headers = described(details, checksums)
    assert all(name.isascii() and value.isascii() and "\n" not in value for name, value in headers.items())
    told = {
        **headers,
        "etag": f'"{"ab" * 16}"',
        "content-length": "7",
        "last-modified": "Thu, 26 Nov 2026 08:00:00 GMT",
    }
    head = head_of("k", answer(told))
    assert (head.key, head.etag, head.size, head.details) == ("k", "ab" * 16, 7, details)
    assert head.uploaded_ms == datetime(2026, 11, 26, 8, tzinfo=UTC).timestamp() * 1000
    assert head.checksums == {**checksums, "md5": bytes.fromhex("ab" * 16)}


def test_what_s3_has_a_header_for_other_tools_can_read() -> None:
    said = Details(
        HttpMetadata("text/plain", "de", "inline", "gzip", "no-store", 1_000),
        {"who": "ann", "what-for": "a b"},
        "InfrequentAccess",
    )
    headers = described(said, {})
    assert headers.pop(OURS)
    assert headers == {
        "content-type": "text/plain", "content-language": "de", "content-disposition": "inline", "content-encoding": "gzip",
        "cache-control": "no-store", "expires": "Thu, 01 Jan 1970 00:00:01 GMT", "x-amz-meta-who": "ann", "x-amz-meta-what-for": "a b",
        "x-amz-storage-class": "STANDARD_IA",
    }  # fmt: skip
    assert described(Details(), {}) == {}
    assert described(Details(HttpMetadata("text/plain")), {}) == {"content-type": "text/plain"}


def test_metadata_is_as_large_as_s3_takes() -> None:
    for size, is_taken in ((MAX_META_BYTES - 1, True), (MAX_META_BYTES, False)):
        details = Details(custom_metadata={"a": "x" * size})
        if is_taken:
            assert described(details, {}) == {"x-amz-meta-a": "x" * size}
        else:
            with pytest.raises(R2Error) as refused:
                described(details, {})
            assert refused.value.number == 10012


@pytest.mark.parametrize("ours", ["", "not base64", "W10=", "e30", "//8="])
def test_an_object_that_another_tool_has_put_is_read_as_far_as_it_goes(ours: str) -> None:
    headers = {
        OURS: ours,
        "content-type": "binary/octet-stream",
        "expires": "Thu, 01 Jan 1970 00:00:01 GMT",
        "etag": '"x-2"',
    }
    head = head_of("k", answer({**headers, "x-amz-meta-a": "b"}))
    assert head == ObjectHead("k", "x-2", 0, "x-2", 0, Details(HttpMetadata(cache_expiry_ms=1000), {"a": "b"}), {})


@pytest.mark.parametrize("space", ["", "{http://s3.amazonaws.com/doc/2006-03-01/}"])
def test_an_entry_of_a_list_is_an_object_with_or_without_a_namespace(space: str) -> None:
    entry = ElementTree.Element(f"{space}Contents")
    told = {"Key": "a%20b+c%2B", "Size": "7", "ETag": f'"{"ab" * 16}"', "LastModified": "2026-11-26T08:00:00.500Z"}
    for name, text in told.items():
        ElementTree.SubElement(entry, f"{space}{name}").text = text
    head = listed(entry)
    assert head.key == "a b c+"
    assert head.size == 7
    assert head.etag == "ab" * 16
    assert head.checksums == {"md5": bytes.fromhex("ab" * 16)}
    assert head.uploaded_ms == datetime(2026, 11, 26, 8, tzinfo=UTC).timestamp() * 1000


def test_a_time_that_cannot_be_read_is_none() -> None:
    assert [time_of(text) for text in (None, "", "yesterday", "Thu, 01 Jan 1970 00:00:02 GMT")] == [0, 0, 0, 2000]
