"""Convert files to Markdown with `markitdown`, a dependency of the function.

Thus the code that parses foreign files is confined like the function.
"""

import asyncio
import importlib
import io
import mimetypes
import os
from typing import Any

from workers.face import Record
from workers.http.forms import Blob

SUFFIXES = (".pdf", ".docx", ".xlsx", ".xls", ".pptx", ".html", ".xml", ".csv", ".json", ".txt", ".md")


def supported() -> list[Record]:
    return [Record(extension=suffix, mimeType=mimetypes.guess_type(f"a{suffix}")[0]) for suffix in SUFFIXES]


async def converted(file: Any) -> Record:
    """Return {name, mimeType, format, tokens, data}.
    If the file cannot be converted: {name, mimeType, format: "error", error}."""
    try:
        markitdown: Any = importlib.import_module("markitdown")
    except ImportError:
        raise NotImplementedError(
            "toMarkdown needs the library `markitdown`: add markitdown[all] to the function's dependencies"
        ) from None
    name, blob = file["name"], file["blob"]
    data = await blob.bytes() if isinstance(blob, Blob) else bytes(blob)
    kind = (blob.type if isinstance(blob, Blob) else "") or mimetypes.guess_type(name)[0] or "application/octet-stream"

    def work() -> str:
        converter = markitdown.MarkItDown(enable_plugins=False)
        return str(converter.convert_stream(io.BytesIO(data), file_extension=os.path.splitext(name)[1]).markdown)

    try:
        text = await asyncio.to_thread(work)
    except Exception as error:
        return Record(name=name, mimeType=kind, format="error", error=f"{type(error).__name__}: {error}")
    return Record(name=name, mimeType=kind, format="markdown", tokens=len(text) // 4, data=text)
