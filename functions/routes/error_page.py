"""The error page for browsers when a function fails.

It shows the error's message and, if the site shows errors, the author's part of the traceback.
"""

from html import escape

from starlette.types import Scope, Send

from pilotlight.functions.host.faults import Fault
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.http.asgi import header, response_start

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 60rem; padding: 0 1rem; color-scheme: light dark }}
pre {{ overflow-x: auto; padding: 1rem; border: 1px solid; border-radius: 4px }}
</style></head><body><h1>{title}</h1><p>{sentence}</p>{detail}</body></html>
"""


def wants_page(scope: Scope) -> bool:
    """Tell whether the client is a browser that loads a page: it accepts HTML."""
    return "text/html" in (header(scope, "accept") or "")


async def send_error_page(send: Send, error: ApiError, fault: Fault, *, shows_detail: bool) -> None:
    status = error.status(Dialect.OPENAI)
    title = escape(fault.name if shows_detail else "The function failed")
    detail = f"<pre>{escape(fault.detail)}</pre>" if shows_detail and fault.detail else ""
    page = PAGE.format(title=title, sentence=escape(error.message), detail=detail).encode()
    headers = [("content-type", "text/html; charset=utf-8"), ("content-length", str(len(page)))]
    await send(response_start(status, headers))
    await send({"type": "http.response.body", "body": page})
