"""Names for annotations: aliases of Python types."""

from collections.abc import AsyncIterable, Iterable
from typing import Any

from workers.http.forms import Blob, FormData
from workers.http.headers import Headers

Body = str | bytes | bytearray | memoryview | AsyncIterable[Any] | Iterable[Any] | Blob | FormData | None
BlobValue = str | bytes | bytearray | memoryview | Blob
BlobEnding = str
FormDataValue = str | Blob
FetchKwargs = dict[str, Any]
RequestInitCfProperties = dict[str, Any]
JSBody = Any

__all__ = [
    "BlobEnding",
    "BlobValue",
    "Body",
    "FetchKwargs",
    "FormDataValue",
    "Headers",
    "JSBody",
    "RequestInitCfProperties",
]
