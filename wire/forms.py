"""Forms with a file (RFC 7578), parsed as they arrive."""

from collections.abc import AsyncGenerator

from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from pilotlight.wire.errors import ApiError

MOST_FIELDS = 8  # limit of the fields besides the file


async def read_form(content_type: str, body: AsyncGenerator[bytes, None]) -> FormData:
    """Return a form's fields and its file.
    The caller must close the form, because a file of 1 MiB or more is on the disk. Raises ApiError, and the exceptions of `body`."""
    if not content_type.lower().startswith("multipart/form-data"):
        raise ApiError("invalid_request", "a file is sent as multipart/form-data, in the field file")
    headers = Headers({"content-type": content_type})
    try:
        return await MultiPartParser(headers, body, max_files=1, max_fields=MOST_FIELDS).parse()
    except MultiPartException as error:
        raise ApiError("invalid_request", f"the form cannot be read: {error.message}") from None


def file_in(form: FormData) -> UploadFile:
    """Return a form's file. Raises ApiError if it has none."""
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise ApiError("invalid_request", "the form has no file in its field file", param="file")
    return file
