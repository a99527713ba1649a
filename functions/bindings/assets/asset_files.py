"""Static assets: serve the files of a folder, with ETags and canonical URLs for HTML pages.

A path without a file gets the fallback that the manifest sets as `not_found_handling`.

A path is resolved part by part below the folder; a path that leads out of it, even through a link, is treated as missing.
"""

import asyncio
import hashlib
import mimetypes
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from pilotlight.functions.bindings.assets.asset_rules import HEADERS, REDIRECTS, AssetRules, Rewrite, encoded
from pilotlight.functions.bindings.binding import Binding, BindingError, Body, Services, method
from pilotlight.functions.bindings.storage.r2_files import FileContent
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.manifest import BindingDeclaration

MAX_ASSET_BYTES = 25 << 20
TYPES = {  # types that Python knows only by files of the machine
    ".avif": "image/avif", ".js": "text/javascript", ".map": "application/json", ".md": "text/markdown", ".mjs": "text/javascript",
    ".otf": "font/otf", ".ttf": "font/ttf", ".webp": "image/webp", ".woff": "font/woff", ".woff2": "font/woff2",
}  # fmt: skip
HIDDEN = (".assetsignore", ".dev.vars", "_worker.js", REDIRECTS, HEADERS)
HTML_HANDLING = ("auto-trailing-slash", "force-trailing-slash", "drop-trailing-slash", "none")
NOT_FOUND_HANDLING = ("none", "404-page", "single-page-application")


class FetchCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    method: str
    url: str
    headers: list[tuple[str, str]] = []
    body: bytes = b""
    web_socket: bool = False  # if set, `body` streams the socket's messages


class Redirect(NamedTuple):
    path: str


class Assets(Binding):
    kind = "assets"

    def __init__(
        self, folder: Path, html_handling: str = "auto-trailing-slash", not_found_handling: str = "none"
    ) -> None:
        self._folder = folder.resolve()
        self._html_handling = html_handling
        self._not_found_handling = not_found_handling
        self._tags: dict[tuple[str, int, int], str] = {}
        self._rules = AssetRules(self._folder)

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "Assets":
        options = declaration.options
        folder = Path(options["directory"])
        if not folder.is_dir():
            raise BindingError(f"{declaration.name}: there is no folder {folder.name!r} in the function's folder")
        html, missing = options.get("html_handling", HTML_HANDLING[0]), options.get("not_found_handling", "none")
        for name, value, known in (
            ("html_handling", html, HTML_HANDLING),
            ("not_found_handling", missing, NOT_FOUND_HANDLING),
        ):
            if value not in known:
                raise BindingError(f"{declaration.name}: {name} is one of {', '.join(known)}, not {value!r}")
        return cls(folder, html, missing)

    @method
    async def fetch(self, request: FetchCall, body: Body | None) -> Any:
        if request.method not in ("GET", "HEAD"):
            return {"status": 405, "headers": [("allow", "GET, HEAD")], "body": b""}
        if (found := await self.found(request)) is not None:
            return found
        missing = await asyncio.to_thread(self._fallback, urlsplit(request.url).path or "/")
        if missing is None:
            return {"status": 404, "headers": [], "body": b""}
        return await self._response(
            200 if self._not_found_handling == "single-page-application" else 404, missing, request
        )

    async def found(self, request: FetchCall) -> Any:
        """Return the response for a URL that has a file or a redirect; None if it has neither."""
        parts = urlsplit(request.url)
        ruled = self._rules.redirect(request.url)
        if isinstance(ruled, tuple) and not isinstance(ruled, Rewrite):
            return {"status": ruled[0], "headers": [("location", ruled[1])], "body": b""}
        if isinstance(ruled, Rewrite):
            found = await asyncio.to_thread(lambda: self._file(ruled.path) or self._find(ruled.path))
        else:
            found = await asyncio.to_thread(self._find, parts.path or "/")
        if isinstance(found, Redirect):
            location = encoded(found.path) + (f"?{parts.query}" if parts.query else "")
            return {"status": 307, "headers": [("location", location)], "body": b""}
        return None if found is None else await self._response(200, found, request)

    async def _response(self, status: int, path: Path, request: FetchCall) -> Any:
        tag, size = await asyncio.to_thread(self._tag_and_size, path)
        headers = [
            ("content-type", _content_type(path)),
            ("etag", f'"{tag}"'),
            ("cache-control", "public, max-age=0, must-revalidate"),
        ]
        headers = self._rules.applied(request.url, headers)
        asked = {name.lower(): value for name, value in request.headers}
        if status == 200 and _matches(tag, asked.get("if-none-match", "")):
            return {"status": 304, "headers": headers, "body": b""}
        headers.append(("accept-ranges", "bytes"))
        start, length = 0, size
        if status == 200 and "range" in asked and _matches(tag, asked.get("if-range", "*")):
            span = span_of(asked["range"], size)
            if span is None:
                return {"status": 416, "headers": [*headers, ("content-range", f"bytes */{size}")], "body": b""}
            if span != (0, size):
                status, (start, length) = 206, span
                headers.append(("content-range", f"bytes {start}-{start + length - 1}/{size}"))
        headers.append(("content-length", str(length)))
        if request.method == "HEAD":
            return {"status": status, "headers": headers, "body": b""}
        return StreamingReply(
            {"status": status, "headers": headers}, FileContent(await asyncio.to_thread(_opened, path, start), length)
        )

    def _find(self, path: str) -> Path | Redirect | None:
        file = self._file(path)
        if self._html_handling == "none":
            return file
        if path.endswith("/index.html"):
            return Redirect(path.removesuffix("index.html")) if file is not None else None
        if path.endswith(".html") and file is not None:
            bare = path.removesuffix(".html")
            return Redirect(f"{bare}/" if self._html_handling == "force-trailing-slash" else bare)
        if file is not None:
            return file
        bare = path.rstrip("/")
        page, index = self._file(f"{bare}.html") if bare else None, self._file(f"{bare}/index.html")
        return self._tidy(path, bare, page, index)

    def _tidy(self, path: str, bare: str, page: Path | None, index: Path | None) -> Path | Redirect | None:
        """Return the file of an HTML page if `path` is its canonical path, else a redirect to that path.
        By default a page's path has no slash at its end, and the path of a folder's index.html has one."""
        if not bare or (page is None and index is None):
            return index
        has_slash = path.endswith("/")
        if self._html_handling == "auto-trailing-slash":
            wants_slash = (page is None) if not has_slash else index is not None
        else:
            wants_slash = self._html_handling == "force-trailing-slash"
        if has_slash != wants_slash:
            return Redirect(f"{bare}/" if wants_slash else bare)
        return (index or page) if has_slash else (page or index)

    def _fallback(self, path: str) -> Path | None:
        if self._not_found_handling == "single-page-application":
            return self._file("/index.html")
        if self._not_found_handling == "404-page":
            folder = path.rsplit("/", 1)[0]
            while True:
                if (page := self._file(f"{folder}/404.html")) is not None or not folder:
                    return page
                folder = folder.rsplit("/", 1)[0]
        return None

    def _file(self, path: str) -> Path | None:
        """Return the regular file at a path that begins with a slash; None if there is none below the folder."""
        parts = [unquote(part) for part in path.split("/")[1:]]
        if any(part in ("", ".", "..", *HIDDEN) or "/" in part or "\0" in part for part in parts):
            return None
        try:
            found = self._folder.joinpath(*parts).resolve(strict=True)
            status = found.stat()
        except (OSError, ValueError, RuntimeError):
            return None
        is_inside = found.is_relative_to(self._folder) and stat.S_ISREG(status.st_mode)
        return found if is_inside and status.st_size <= MAX_ASSET_BYTES else None

    def _tag_and_size(self, path: Path) -> tuple[str, int]:
        status = path.stat()
        key = (str(path), status.st_mtime_ns, status.st_size)
        if key not in self._tags:
            self._tags[key] = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
        return self._tags[key], status.st_size


def span_of(header: str, size: int) -> tuple[int, int] | None:
    """Return the start and length of the range that the header asks for; None if it is outside the file.

    Several ranges, or an invalid header, mean the whole file.
    """
    found = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", header.strip())
    if found is None or not (found[1] or found[2]):
        return 0, size
    if not found[1]:
        length = min(int(found[2]), size)
        return (size - length, length) if length else None
    start = int(found[1])
    if start >= size:
        return None
    end = min(int(found[2]), size - 1) if found[2] else size - 1
    return (start, end - start + 1) if end >= start else (0, size)


def _content_type(path: Path) -> str:
    kind, coding = mimetypes.guess_type(path.name)
    if coding is not None:  # the file is sent as it is, without a Content-Encoding
        kind = "application/gzip" if coding == "gzip" else None
    kind = TYPES.get(path.suffix.lower()) or kind or "application/octet-stream"
    return f"{kind}; charset=utf-8" if kind.startswith("text/") or kind == "application/json" else kind


def _opened(path: Path, start: int) -> Any:
    file = path.open("rb", buffering=0)
    file.seek(start)
    return file


def _matches(tag: str, header: str) -> bool:
    return any(each.strip().removeprefix("W/").strip('"') in (tag, "*") for each in header.split(","))
