"""Blob, File and FormData, and the two formats of forms.

Both formats are decoded; only multipart is encoded.
"""

import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from email.message import Message
from typing import Any
from urllib.parse import parse_qsl

Data = bytes  # an alias for use inside Blob, which has a method named `bytes`


class Blob:
    """Bytes with a media type."""

    def __init__(
        self, parts: Any = (), content_type: str | None = None, endings: str | None = None, *, type: str = ""
    ) -> None:
        """`endings`: "native" replaces CR LF in strings by LF."""
        if isinstance(parts, Blob):
            content_type = content_type or parts.content_type
        if isinstance(parts, (str, bytes, bytearray, memoryview, Blob)):
            parts = [parts]
        if not isinstance(parts, Iterable):
            raise TypeError(f"a Blob is made of str, bytes and Blobs, and not of {parts.__class__.__name__}")
        if endings == "native":
            parts = [part.replace("\r\n", "\n") if isinstance(part, str) else part for part in parts]
        self._data = b"".join(_bytes_of(part) for part in parts)
        self.content_type: str = content_type or type

    @classmethod
    def new(cls, parts: Any = (), options: Any = None) -> "Blob":
        return cls(parts, type=(options or {}).get("type", ""))

    @property
    def type(self) -> str:
        return self.content_type

    @property
    def size(self) -> int:
        return len(self._data)

    async def bytes(self) -> Data:
        return self._data

    async def text(self) -> str:
        return self._data.decode("utf-8", "replace")

    async def array_buffer(self) -> Data:
        from workers.face import Buffer  # imported here, because its package imports this module

        return Buffer(self._data)

    @property
    def js_object(self) -> "Blob":
        """The JavaScript object that the platform's SDK wraps; here the object itself."""
        return self

    def stream(self) -> AsyncIterator[Data]:
        async def pieces() -> AsyncIterator[Data]:
            yield self._data

        return pieces()

    def slice(self, start: int | None = None, end: int | None = None, content_type: str = "") -> "Blob":
        return Blob([self._data[start:end]], content_type)

    def raw(self) -> Data:
        return self._data

    arrayBuffer = array_buffer


class File(Blob):
    def __init__(
        self,
        parts: Any,
        filename: str,
        content_type: str | None = None,
        endings: str | None = None,
        last_modified: int | None = None,
        *,
        type: str = "",
        name: str = "",
    ) -> None:
        """Make a file of `parts`.
        `last_modified` is a Unix time in ms; the default is now, or the time of `parts` if that is a File."""
        super().__init__(parts, content_type, endings, type=type)
        self.name = filename or name
        before = parts.last_modified if isinstance(parts, File) else time.time_ns() // 1_000_000
        self.last_modified: int = before if last_modified is None else last_modified

    @property
    def lastModified(self) -> int:
        return self.last_modified

    @classmethod
    def new(cls, parts: Any = (), name: Any = "", options: Any = None) -> "File":  # type: ignore[override]  # as in JavaScript
        given = options or {}
        return cls(parts, str(name), type=given.get("type", ""), last_modified=given.get("lastModified"))


class FormData:
    """Form fields in order, each with one or several values."""

    def __init__(self, form: Any = None) -> None:
        self._items: list[tuple[str, Any]] = []
        if isinstance(form, FormData):
            self._items = list(form._items)
        elif form is not None:
            pairs: Iterable[tuple[str, Any]] = form.items() if isinstance(form, Mapping) else form
            for name, value in pairs:
                several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
                for one in value if several else [value]:
                    self.append(name, one)

    @classmethod
    def new(cls, form: Any = None) -> "FormData":
        return cls(form)

    def append(self, name: str, value: Any, filename: str | None = None) -> None:
        self._items.append((name, _field(value, filename)))

    def set(self, name: str, value: Any, filename: str | None = None) -> None:
        self.delete(name)
        self.append(name, value, filename)

    def delete(self, name: str) -> None:
        self._items = [item for item in self._items if item[0] != name]

    def get(self, name: str, default: Any = None) -> Any:
        return next((value for key, value in self._items if key == name), default)

    def get_all(self, name: str) -> list[Any]:
        return [value for key, value in self._items if key == name]

    def has(self, name: str) -> bool:
        return name in self

    def keys(self) -> list[str]:
        return [name for name, _ in self._items]

    def values(self) -> list[Any]:
        return [value for _, value in self._items]

    def items(self) -> list[tuple[str, Any]]:
        return list(self._items)

    entries, getAll = items, get_all

    @property
    def js_object(self) -> "FormData":
        """The JavaScript object that the platform's SDK wraps; here the object itself."""
        return self

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return self.get(name)

    __setitem__ = set

    def __contains__(self, name: object) -> bool:
        return any(key == name for key, _ in self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self._items)


def encode_multipart(form: FormData) -> tuple[bytes, str]:
    """Return the form's bytes and their content type."""
    boundary = f"----pilotlight{os.urandom(12).hex()}"
    parts: list[bytes] = []
    for name, value in form.items():
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{_quoted(name)}"'
        if isinstance(value, Blob):
            filename = getattr(value, "name", "blob")
            head += f'; filename="{_quoted(filename)}"\r\nContent-Type: {value.type or "application/octet-stream"}'
            parts += [head.encode(), b"\r\n\r\n", value.raw(), b"\r\n"]
        else:
            parts += [head.encode(), b"\r\n\r\n", value.encode(), b"\r\n"]
    parts.append(f"--{boundary}--\r\n".encode())
    return b"".join(parts), f"multipart/form-data; boundary={boundary}"


def decode_form(body: bytes, content_type: str) -> FormData:
    """Decode a form. Raises TypeError for other content types, ValueError for an invalid body."""
    header = Message()
    header["content-type"] = content_type
    kind = header.get_content_type()
    if kind == "application/x-www-form-urlencoded":
        return FormData(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))
    boundary = header.get_param("boundary")
    if kind != "multipart/form-data" or not isinstance(boundary, str):
        raise TypeError(f"the content type {content_type!r} is not a form's")
    form = FormData()
    separator = b"--" + boundary.encode()
    pieces = (b"\r\n" + body).split(b"\r\n" + separator)
    if len(pieces) < 2 or not pieces[-1].startswith(b"--"):
        raise ValueError("the form does not end with its boundary: it was cut off")
    for piece in pieces[1:-1]:
        head, found, data = piece.partition(b"\r\n\r\n")
        if not found:
            raise ValueError("a part of the form has no headers")
        _add_part(form, head.decode("utf-8", "replace"), data)
    return form


def _add_part(form: FormData, head: str, data: bytes) -> None:
    fields = Message()
    for line in head.split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            fields[name.strip()] = value.strip()
    part_name = fields.get_param("name", header="content-disposition")
    filename = fields.get_param("filename", header="content-disposition")
    if not isinstance(part_name, str):
        raise ValueError("a part of the form has no name")
    if isinstance(filename, str):
        form.append(part_name, File([data], filename, fields.get("content-type", "application/octet-stream")))
    else:
        form.append(part_name, data.decode("utf-8", "replace"))


def _field(value: Any, filename: str | None) -> Any:
    if isinstance(value, (bytes, bytearray, memoryview)):
        value = Blob([value])
    if isinstance(value, Blob):
        return File([value.raw()], filename, value.type) if filename is not None else value
    return value if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def _bytes_of(part: Any) -> bytes:
    if isinstance(part, str):
        return part.encode()
    if isinstance(part, Blob):
        return part.raw()
    if isinstance(part, (bytes, bytearray, memoryview)):
        return bytes(part)
    raise TypeError(f"a Blob is made of str, bytes and Blobs, and not of {type(part).__name__}")
