"""The head of a response, as bytes: the one writer of them."""

from collections.abc import Iterable
from http import HTTPStatus

_STATUS_LINES: dict[int, bytes] = {}


def response_head(status: int, headers: Iterable[tuple[bytes, bytes]], *lines: bytes) -> bytes:
    """`lines` are whole headers, ends included. Raises ValueError for a line end inside a header."""
    parts = [_status_line(status)]
    for name, value in headers:
        if b"\n" in value or b"\r" in value or b"\n" in name or b"\r" in name:
            raise ValueError("a header holds a line end")
        parts += (name, b": ", value, b"\r\n")
    return b"".join((*parts, *lines, b"\r\n"))


def _status_line(status: int) -> bytes:
    line = _STATUS_LINES.get(status)
    if line is None:
        phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
        line = _STATUS_LINES[status] = f"HTTP/1.1 {status} {phrase}\r\n".encode()
    return line
