"""The description of an R2 object, and its rules without I/O: conditions, ranges, ETags."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

MAX_KEY_BYTES = 1024
MAX_METADATA_BYTES = 8192
MAX_PARTS = 10_000
MIN_PART_BYTES = 5 << 20
DIGEST_BYTES = {"md5": 16, "sha1": 20, "sha256": 32, "sha384": 48, "sha512": 64}

Count = Annotated[int, Meta(ge=0, le=2**53)]


class R2Error(Exception):
    """R2 refuses a request; the number is the platform's error code."""

    def __init__(self, sentence: str, number: int, status: int, word: str = "") -> None:
        super().__init__(sentence)
        self.number = number
        self.status = status
        self.word = word


class HttpMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    content_type: str | None = None
    content_language: str | None = None
    content_disposition: str | None = None
    content_encoding: str | None = None
    cache_control: str | None = None
    cache_expiry_ms: int | None = None


class Details(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The metadata that an object's writer sets."""

    http_metadata: HttpMetadata = HttpMetadata()
    custom_metadata: dict[str, str] = {}
    storage_class: Literal["Standard", "InfrequentAccess"] = "Standard"


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    etag_matches: list[str] | None = None  # ["*"] matches any object
    etag_does_not_match: list[str] | None = None
    uploaded_before_ms: float | None = None
    uploaded_after_ms: float | None = None
    seconds_granularity: bool = False

    def hold(self, head: "ObjectHead | None") -> bool:
        etag = None if head is None else head.etag
        if self.etag_matches is not None:
            if not _is_among(etag, self.etag_matches):
                return False
        elif (
            self.uploaded_before_ms is not None and head is not None and not self._time(head) < self.uploaded_before_ms
        ):
            return False
        if self.etag_does_not_match is not None:
            return not _is_among(etag, self.etag_does_not_match)
        if self.uploaded_after_ms is not None:
            return head is None or self._time(head) > self.uploaded_after_ms
        return True

    def _time(self, head: "ObjectHead") -> int:
        return head.uploaded_ms // 1000 * 1000 if self.seconds_granularity else head.uploaded_ms


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    offset: Count | None = None
    length: Count | None = None
    suffix: Count | None = None

    def within(self, size: int) -> "ByteRange":
        if self.suffix is not None:
            if self.offset is not None or self.length is not None:
                raise R2Error("a range is a suffix, or an offset and a length", 10039, 416)
            length = min(self.suffix, size)
            return ByteRange(size - length, length)
        start = self.offset or 0
        if start > size or (start == size and size) or self.length == 0:
            raise R2Error(f"The requested range is not satisfiable: the object has {size} bytes.", 10039, 416)
        left = size - start
        return ByteRange(start, left if self.length is None else min(self.length, left))


class ByteRange(NamedTuple):
    start: int
    length: int


class UploadedPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    part_number: int
    etag: str


class ObjectHead(NamedTuple):
    key: str
    version: str
    size: int
    etag: str
    uploaded_ms: int
    details: Details
    checksums: dict[str, bytes]

    def as_value(self, include: set[str] | None = None) -> dict[str, Any]:
        """Return the object as functions receive it.
        `include` names the metadata that a list shows; None shows all."""
        value = {
            "key": self.key,
            "version": self.version,
            "size": self.size,
            "etag": self.etag,
            "uploaded_ms": self.uploaded_ms,
            "storage_class": self.details.storage_class,
            "checksums": self.checksums,
        }
        if include is None or "httpMetadata" in include:
            value["http_metadata"] = msgspec.to_builtins(self.details.http_metadata)
        if include is None or "customMetadata" in include:
            value["custom_metadata"] = self.details.custom_metadata
        return value


class R2Listing(NamedTuple):
    heads: list[ObjectHead]
    prefixes: list[str]
    cursor: str | None  # None if the list is complete


class Digests:
    """Computes the MD5 for the ETag, and the requested checksum, of bytes as they pass."""

    def __init__(self, checksum: tuple[str, bytes] | None) -> None:
        self._expected = checksum
        names = {"md5"} | ({checksum[0]} if checksum is not None else set())
        for name in names:
            if name not in DIGEST_BYTES:
                raise R2Error(f"there is no checksum {name!r}; there is {', '.join(DIGEST_BYTES)}", 10037, 400)
        if checksum is not None and len(checksum[1]) != DIGEST_BYTES[checksum[0]]:
            sentence = f"a {checksum[0]} has {DIGEST_BYTES[checksum[0]]} bytes, and not {len(checksum[1])}"
            raise R2Error(sentence, 10037, 400)
        self._hashes = {name: hashlib.new(name, usedforsecurity=False) for name in names}

    def update(self, data: bytes) -> None:
        for each in self._hashes.values():
            each.update(data)

    def checked(self) -> dict[str, bytes]:
        """Return the digests by algorithm. Raises R2Error if the expected checksum differs."""
        found = {name: each.digest() for name, each in self._hashes.items()}
        if self._expected is not None and found[self._expected[0]] != self._expected[1]:
            name, expected = self._expected
            sentence = f"The {name} checksum you specified did not match what we received: {expected.hex()} and {found[name].hex()}."
            raise R2Error(sentence, 10037, 400)
        return found


def chosen_parts(parts: Sequence[UploadedPart], uploaded: Mapping[int, tuple[str, int]]) -> list[int]:
    """Return the part numbers of a completed upload, in order.
    `uploaded` has (etag, size) of each existing part. Raises R2Error by R2's rules, some of which S3 does not enforce."""
    chosen = sorted(parts, key=lambda part: part.part_number)
    numbers = [part.part_number for part in chosen]
    if not parts or len(set(numbers)) != len(numbers):
        raise R2Error("Complete needs every part once, and at least one.", 10025, 400)
    for part in chosen:
        if uploaded.get(part.part_number, ("",))[0] != part.etag.strip('"'):
            sentence = f"One or more of the specified parts could not be found: part {part.part_number}."
            raise R2Error(sentence, 10025, 400)
    *sizes, last = (uploaded[number][1] for number in numbers)
    if any(size < MIN_PART_BYTES for size in sizes):
        sentence = f"Your proposed upload is smaller than the minimum: all parts but the last have {MIN_PART_BYTES} bytes or more."
        raise R2Error(sentence, 10011, 400)
    if len(set(sizes)) > 1 or (sizes and last > sizes[0]):
        raise R2Error("All non-trailing parts must have the same length.", 10048, 400)
    return numbers


def decoded_cursor(cursor: str) -> bytes:
    try:
        return base64.b64decode(cursor.encode(), altchars=b"-_", validate=True)
    except ValueError:
        raise R2Error("the cursor does not come from a list", 10022, 400) from None


def multipart_etag(etags: Sequence[str]) -> str:
    """Return a multipart ETag as S3 does: the MD5 of the parts' MD5s, and the number of parts."""
    joined = b"".join(bytes.fromhex(etag) for etag in etags)
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(etags)}"


def _is_among(etag: str | None, wanted: list[str]) -> bool:
    return etag is not None and any(each == "*" or each.strip('"') == etag for each in wanted)
