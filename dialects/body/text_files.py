"""Files of text in messages: each dialect's form becomes the file's name, if it has one, and its text.

The content decides, not the media type, because clients send source code with many types. Of other files only PDF files are recognised.
"""

from base64 import b64decode
from typing import Any, NamedTuple

from pilotlight.dialects.body.invalid_values import ValidationError

NO_PDF = "(A PDF file that cannot be read here.)"
_PDF_AS_BASE64 = "JVBERi"  # the beginning of each PDF file


class SentFile(NamedTuple):
    """A file in a part of a message, as it was sent."""

    data: Any  # base64, or a data: URL
    name: Any
    media_type: str
    where: str  # path of `data` in the part

    @property
    def is_pdf(self) -> bool:
        if not isinstance(self.name, str | None):
            return False
        begins = isinstance(self.data, str) and self.data[:200].rpartition(",")[2].startswith(_PDF_AS_BASE64)
        return begins or self.media_type == "application/pdf" or (self.name or "").lower().endswith(".pdf")

    def named_text(self, at: str = "") -> str:
        """Return the file's name, if it has one, and its text.

        `at` is the path of the part. Raises ValidationError."""
        if not isinstance(self.name, str | None):
            raise ValidationError("must be a string", where=f"{at}{self.where.rpartition('.')[0]}.filename")
        return f"{self.name}\n{self.text(at)}" if self.name else self.text(at)

    def text(self, at: str = "") -> str:
        """Return the file's text, or NO_PDF. `at` is the path of the part. Raises ValidationError."""
        if self.is_pdf:
            return NO_PDF
        at += self.where
        if not isinstance(self.data, str):
            word = "invalid_request" if self.where.endswith("data") else "unsupported_parameter"
            raise ValidationError(f"send the file itself, {_AS_BASE64}", word, at)
        head, comma, data = self.data.partition(",")
        if comma and not head.lower().endswith(";base64"):
            raise ValidationError(f"must be the file {_AS_BASE64}", where=at)
        try:
            text = b64decode(data if comma else head, validate=True).decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\0"
        except ValueError as error:
            raise ValidationError(f"is no base64: {error}", where=at) from None
        if "\0" in text:
            kind = f" but {self.media_type[:50]}" if self.media_type else ""
            raise ValidationError(f"is no text in UTF-8{kind}: send the file's text, or an image as an image", where=at)
        return text


_AS_BASE64 = "as base64 or as a data: URL such as data:text/plain;base64,..."


def file_in(part: dict[str, Any]) -> SentFile | None:
    """Return the file that is a part of a message; None for other parts."""
    match part:
        case {"type": "file"}:
            return _openai_file(part.get("file"), ".file")
        case {"type": "input_file"}:
            return _openai_file(part, "")
        case {"type": "document", "source": {"type": "base64", **source}}:
            return SentFile(source.get("data"), part.get("title"), str(source.get("media_type", "")), ".source.data")
    return None


def _openai_file(fields: Any, where: str) -> SentFile:
    found: dict[str, Any] = fields if isinstance(fields, dict) else {}
    sent = [name for name in ("file_data", "file_id", "file_url") if found.get(name) is not None]
    data, field = found.get("file_data"), sent[0] if sent else "file_data"
    head = data[:200].partition(";")[0] if isinstance(data, str) else ""
    media_type = head[5:].lower() if head[:5].lower() == "data:" else ""
    return SentFile(data, found.get("filename"), media_type, f"{where}.{field}")
