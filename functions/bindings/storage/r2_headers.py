"""Converts the details of R2 objects to S3's HTTP headers and back, and parses lists of objects.

Details that S3 has a header for use that header, so other tools can read them; the rest is in one header of ours.
"""

import base64
import json
from datetime import UTC, datetime
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from pilotlight.functions.bindings.storage.r2_objects import Details, HttpMetadata, ObjectHead, R2Error
from pilotlight.functions.bindings.storage.s3 import S3Answer, text_of

OURS = "x-amz-meta-pilotlight"  # JSON in base64: the details that S3 has no header for
MAX_META_BYTES = 2048  # S3's limit for all metadata of a PUT
UNSAID = ("binary/octet-stream", "application/octet-stream")  # S3 returns these for an object stored without a type
HEADERS = {
    "content_type": "content-type", "content_language": "content-language", "content_disposition": "content-disposition",
    "content_encoding": "content-encoding", "cache_control": "cache-control",
}  # fmt: skip
STORAGE_CLASSES = {"Standard": "STANDARD", "InfrequentAccess": "STANDARD_IA"}


def described(details: Details, checksums: dict[str, bytes]) -> dict[str, str]:
    """Return an object's details as S3 headers. Raises R2Error above S3's limits."""
    headers: dict[str, str] = {}
    further: dict[str, Any] = {}
    http = details.http_metadata
    for field, name in HEADERS.items():
        value = getattr(http, field)
        if value is not None and _is_plain(value):
            headers[name] = value
        if value is not None and (not _is_plain(value) or value in UNSAID):
            further.setdefault("http", {})[field] = value
    if http.cache_expiry_ms is not None:
        headers["expires"] = format_datetime(datetime.fromtimestamp(http.cache_expiry_ms / 1000, UTC), usegmt=True)
        further["expires_ms"] = http.cache_expiry_ms
    if all(_is_name(name) and _is_plain(value) for name, value in details.custom_metadata.items()):
        headers |= {f"x-amz-meta-{name}": value for name, value in details.custom_metadata.items()}
    else:
        further["custom"] = details.custom_metadata
    if details.storage_class != "Standard":
        headers["x-amz-storage-class"] = STORAGE_CLASSES[details.storage_class]
    if checksums:
        further["checksums"] = {name: digest.hex() for name, digest in checksums.items()}
    if further:
        headers[OURS] = base64.b64encode(json.dumps(further, separators=(",", ":")).encode()).decode()
    size = sum(len(name) - 11 + len(value) for name, value in headers.items() if name.startswith("x-amz-meta-"))
    if size > MAX_META_BYTES:
        sentence = f"Your metadata headers exceed the maximum allowed metadata size: {size} of the {MAX_META_BYTES} bytes that S3 takes."
        raise R2Error(sentence, 10012, 400)
    return headers


def head_of(key: str, answer: S3Answer) -> ObjectHead:
    headers = answer.headers
    further = _further(headers.get(OURS))
    http: dict[str, Any] = {field: headers[name] for field, name in HEADERS.items() if name in headers}
    if http.get("content_type") in UNSAID:
        del http["content_type"]
    http |= further.get("http", {})
    expires = further.get("expires_ms")
    if expires is None and "expires" in headers:
        expires = time_of(headers["expires"]) or None
    custom = further.get("custom")
    if custom is None:
        custom = {
            name.removeprefix("x-amz-meta-"): value
            for name, value in headers.items()
            if name.startswith("x-amz-meta-") and name != OURS
        }
    etag = headers.get("etag", "").strip('"')
    checksums = {name: bytes.fromhex(digest) for name, digest in further.get("checksums", {}).items()}
    if len(etag) == 32:
        checksums["md5"] = bytes.fromhex(etag)
    kept = headers.get("x-amz-storage-class", "STANDARD")
    return ObjectHead(
        key, etag, int(headers.get("content-length", "0")), etag, time_of(headers.get("last-modified")),
        Details(
            HttpMetadata(**http, cache_expiry_ms=expires), custom,
            "InfrequentAccess" if kept == STORAGE_CLASSES["InfrequentAccess"] else "Standard",
        ), checksums,
    )  # fmt: skip


def listed(element: ElementTree.Element) -> ObjectHead:
    etag = text_of(element, "ETag").strip('"')
    at = datetime.fromisoformat(text_of(element, "LastModified", "1970-01-01T00:00:00Z").replace("Z", "+00:00"))
    checksums = {"md5": bytes.fromhex(etag)} if len(etag) == 32 else {}
    key, size = unquote_plus(text_of(element, "Key")), int(text_of(element, "Size", "0"))
    return ObjectHead(key, etag, size, etag, int(at.timestamp()) * 1000, Details(), checksums)


def _further(value: str | None) -> dict[str, Any]:
    """Decode our own header; return {} if another program wrote the object."""
    try:
        found = json.loads(base64.b64decode(value or "", validate=True) or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def time_of(text: str | None) -> int:
    try:
        return int(parsedate_to_datetime(text or "").timestamp()) * 1000
    except (TypeError, ValueError):
        return 0


def _is_plain(value: str) -> bool:
    """Tell whether a value survives in an HTTP header unchanged."""
    return value.isascii() and value.isprintable() and value == " ".join(value.split()) and value != ""


def _is_name(name: str) -> bool:
    return name.isascii() and name == name.lower() and name.replace("-", "a").isalnum() and f"x-amz-meta-{name}" != OURS
