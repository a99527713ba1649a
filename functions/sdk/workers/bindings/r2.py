"""R2 for functions: objects with metadata, streamed bodies, conditions and ranges.

Conditions and ranges may also be given as a request's headers.
"""

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any

from workers.face import Buffer, Face, Items, Named, Record, body_of, key_of, options_of, snake_case
from workers.http.forms import Blob
from workers.http.streams import ByteStream
from workers.javascript import json_text

_HTTP = {
    "content_type": "content-type",
    "content_language": "content-language",
    "content_disposition": "content-disposition",
    "content_encoding": "content-encoding",
    "cache_control": "cache-control",
    "cache_expiry": "expires",
}
_DIGESTS = ("md5", "sha1", "sha256", "sha384", "sha512")
_DETAILS = ("http_metadata", "custom_metadata", "storage_class")
_CONDITIONS = ("etag_matches", "etag_does_not_match", "uploaded_before", "uploaded_after", "seconds_granularity")
_RANGE = re.compile(r"\s*bytes\s*=\s*(\d{0,18})\s*-\s*(\d{0,18})\s*", re.ASCII | re.IGNORECASE)
_INLINE_BYTES = 1 << 20  # larger values are streamed, so that they do not delay other calls


class R2Object(Named):
    def __init__(self, value: Mapping[str, Any], range: Mapping[str, int] | None = None) -> None:
        self.key: str = value["key"]
        self.version: str = value["version"]
        self.size: int = value["size"]
        self.etag: str = value["etag"]
        self.http_etag = f'"{value["etag"]}"'
        self.uploaded = datetime.fromtimestamp(value["uploaded_ms"] / 1000, UTC)
        self.storage_class: str = value["storage_class"]
        self.checksums = R2Checksums({name: Buffer(digest) for name, digest in value["checksums"].items()})
        self.http_metadata = _http_metadata(value.get("http_metadata"))
        self.custom_metadata = Record(value.get("custom_metadata", {}))
        self.range = Record(range) if range is not None else None

    def write_http_metadata(self, headers: Any) -> None:
        """Set a response's headers from the HTTP metadata that is stored with the object."""
        for name, header in _HTTP.items():
            value = self.http_metadata.get(_camel(name))
            if value is not None:
                headers[header] = format_datetime(value, usegmt=True) if isinstance(value, datetime) else value

    def __repr__(self) -> str:
        return f"<R2Object {self.key!r} of {self.size} bytes>"


class R2ObjectBody(R2Object):
    def __init__(self, value: Mapping[str, Any], range: Mapping[str, int], chunks: AsyncIterator[bytes]) -> None:
        super().__init__(value, range)
        self.body = ByteStream(chunks)

    @property
    def body_used(self) -> bool:
        return self.body.body_used

    async def bytes(self) -> Buffer:
        return await self.body.bytes()

    async def array_buffer(self) -> Buffer:
        return await self.body.bytes()

    async def text(self) -> str:
        return await self.body.text()

    async def json(self) -> Any:
        return await self.body.json()

    async def blob(self) -> Any:
        return Blob([await self.bytes()], self.http_metadata.get("contentType") or "")


class R2Checksums(Record):
    def to_json(self) -> Record:
        return Record({name: digest.hex() for name, digest in self.items()})

    toJSON = to_json


class R2MultipartUpload(Named):
    def __init__(self, bucket: "R2Bucket", key: str, upload_id: str) -> None:
        self._bucket = bucket
        self.key = key
        self.upload_id = upload_id

    async def upload_part(self, part_number: int, value: Any, options: Any = None) -> Record:
        whole, stream = _content(value, "R2 uploadPart")
        answer = await self._bucket._begin(
            "upload_part", stream, key=self.key, upload_id=self.upload_id, part_number=int(part_number), value=whole
        )
        return Record(partNumber=answer.value["part_number"], etag=answer.value["etag"])

    async def abort(self) -> None:
        await self._bucket._call("abort", key=self.key, upload_id=self.upload_id)

    async def complete(self, uploaded_parts: Iterable[Mapping[str, Any]]) -> R2Object:
        parts = [{snake_case(name): value for name, value in part.items()} for part in uploaded_parts]
        return R2Object(await self._bucket._call("complete", key=self.key, upload_id=self.upload_id, parts=parts))


class R2Bucket(Face):
    async def head(self, key: str) -> R2Object | None:
        value = await self._call("head", key=key_of(key, "R2 head"))
        return None if value is None else R2Object(value)

    async def get(self, key: str, options: Any = None, **named: Any) -> R2Object | None:
        """Return an object with its body; None if it does not exist.
        If a condition fails, the object has no body."""
        given = options_of(options, named, ("only_if", "range"), "R2 get")
        answer = await self._begin(
            "get", key=key_of(key, "R2 get"), only_if=_conditions(given), range=_range(given.get("range"))
        )
        if answer.value is None:
            return None
        if answer.body is None:
            return R2Object(answer.value["object"])
        return R2ObjectBody(answer.value["object"], answer.value["range"], answer.body)

    async def put(self, key: str, value: Any, options: Any = None, **named: Any) -> R2Object | None:
        """Store an object and return its description; None if a condition fails."""
        given = options_of(options, named, (*_DETAILS, *_DIGESTS, "only_if"), "R2 put")
        digests = [(name, _digest(name, given[name])) for name in _DIGESTS if name in given]
        if len(digests) > 1:
            raise TypeError("R2 put: You cannot specify multiple hashing algorithms.")
        whole, stream = _content(value, "R2 put")
        answer = await self._begin(
            "put",
            stream,
            key=key_of(key, "R2 put"),
            value=whole,
            only_if=_conditions(given),
            details=_details(given),
            checksum=digests[0] if digests else None,
        )
        return None if answer.value is None else R2Object(answer.value)

    async def delete(self, keys: str | Iterable[str]) -> None:
        several = isinstance(keys, Iterable) and not isinstance(keys, (str, bytes))
        await self._call("delete", keys=[key_of(key, "R2 delete") for key in (keys if several else [keys])])

    async def list(self, options: Any = None, **named: Any) -> Record:
        known = ("limit", "prefix", "cursor", "delimiter", "start_after", "include")
        given = options_of(options, named, known, "R2 list")
        listed = await self._call("list", **given)
        result = Record(
            objects=Items(R2Object(value) for value in listed["objects"]),
            truncated=listed["truncated"],
            delimitedPrefixes=Items(listed["delimited_prefixes"]),
        )
        if listed["truncated"]:
            result["cursor"] = listed["cursor"]
        return result

    async def create_multipart_upload(self, key: str, options: Any = None, **named: Any) -> R2MultipartUpload:
        given = options_of(options, named, _DETAILS, "R2 createMultipartUpload")
        answer = await self._call("create_multipart_upload", key=key, details=_details(given))
        return R2MultipartUpload(self, key, answer["upload_id"])

    def resume_multipart_upload(self, key: str, upload_id: str) -> R2MultipartUpload:
        return R2MultipartUpload(self, key, upload_id)


def _content(value: Any, where: str) -> tuple[bytes | None, AsyncIterator[bytes] | None]:
    whole, stream = body_of(b"" if value is None else value, where)
    if whole is not None and len(whole) > _INLINE_BYTES:
        return None, _pieces(whole)
    return whole, stream


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), _INLINE_BYTES):
        yield data[start : start + _INLINE_BYTES]


def _details(given: Mapping[str, Any]) -> dict[str, Any]:
    http = given.get("http_metadata")
    if http is not None and _are_headers(http):
        http = {name: http.get(header) for name, header in _HTTP.items()}
    metadata = options_of(http, {}, tuple(_HTTP), "R2 httpMetadata")
    if (expiry := metadata.pop("cache_expiry", None)) is not None:
        metadata["cache_expiry_ms"] = int(_milliseconds(expiry))
    custom = {str(name): _text(name, value) for name, value in dict(given.get("custom_metadata") or {}).items()}
    details: dict[str, Any] = {"http_metadata": metadata, "custom_metadata": custom}
    if "storage_class" in given:
        details["storage_class"] = given["storage_class"]
    return details


def _conditions(given: Mapping[str, Any]) -> dict[str, Any] | None:
    only_if = given.get("only_if")
    if only_if is None:
        return None
    if _are_headers(only_if):
        only_if = {
            "etag_matches": only_if.get("if-match"),
            "etag_does_not_match": only_if.get("if-none-match"),
            "uploaded_before": only_if.get("if-unmodified-since"),
            "uploaded_after": only_if.get("if-modified-since"),
            "seconds_granularity": True,
        }
    known = options_of(only_if, {}, _CONDITIONS, "R2 onlyIf")
    conditions: dict[str, Any] = {"seconds_granularity": bool(known.get("seconds_granularity"))}
    for name in ("etag_matches", "etag_does_not_match"):
        if name in known:
            conditions[name] = _etags(known[name])
    for name in ("uploaded_before", "uploaded_after"):
        if name in known:
            conditions[f"{name}_ms"] = _milliseconds(known[name])
    return conditions


def _etags(value: Any) -> list[str]:
    listed = value.split(",") if isinstance(value, str) else list(value)
    return [str(etag).strip().removeprefix("W/").strip('"') for etag in listed]


def _range(value: Any) -> dict[str, int] | None:
    """Return {offset, length, suffix} from a dict or from the Range header of a request."""
    if value is None:
        return None
    if _are_headers(value):
        header = value.get("range")
        return None if header is None else _range_of_header(header)
    known = options_of(value, {}, ("offset", "length", "suffix"), "R2 range")
    return {name: int(number) for name, number in known.items()}


def _range_of_header(header: str) -> dict[str, int] | None:
    """Parse a Range header; None if it is invalid, which RFC 9110 section 14.2 requires to ignore."""
    found = _RANGE.fullmatch(header)
    if found is None:
        return None
    first, last = (min(int(digits), 2**53 - 1) if digits else None for digits in found.groups())
    if first is None:
        return None if last is None else {"suffix": last}
    if last is None:
        return {"offset": first}
    return {"offset": first, "length": last - first + 1} if first <= last else None


def _are_headers(value: Any) -> bool:
    return value is not None and type(value).__name__ == "Headers"


def _text(name: Any, value: Any) -> str:
    """Return a metadata value as text, with numbers and booleans written as in JavaScript."""
    if not isinstance(value, (str, int, float)):
        raise TypeError(f"R2 customMetadata: the value of {name!r} must be a str, and not {type(value).__name__}")
    return value if isinstance(value, str) else json_text(value, "R2 customMetadata")


def _digest(name: str, value: Any) -> bytes:
    try:
        return bytes.fromhex(value) if isinstance(value, str) else bytes(value)
    except ValueError:
        raise TypeError(f"R2 put: {name} is bytes or their hexadecimal digits, and not {str(value)[:80]!r}") from None


def _milliseconds(value: Any) -> float:
    """Return the Unix time in ms of a datetime, of a number of ms, or of an HTTP or ISO date."""
    if isinstance(value, str):
        try:
            value = parsedate_to_datetime(value)
        except ValueError:
            value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp() * 1000
    return float(value)


def _http_metadata(value: Mapping[str, Any] | None) -> Record:
    metadata = Record()
    for name, each in (value or {}).items():
        if name == "cache_expiry_ms":
            metadata["cacheExpiry"] = datetime.fromtimestamp(each / 1000, UTC)
        else:
            metadata[_camel(name)] = each
    return metadata


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)
