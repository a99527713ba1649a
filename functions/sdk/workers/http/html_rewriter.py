"""HTMLRewriter: handlers change elements, comments and text of a page while it is streamed.

Other parts pass unchanged. See https://developers.cloudflare.com/workers/runtime-apis/html-rewriter. The standard library's parser finds the tags;
only the names of open elements are kept in memory.
"""

import codecs
import inspect
from collections.abc import AsyncIterator
from html import escape
from html.parser import HTMLParser
from typing import Any

from workers.face import Items, Named
from workers.http.body import as_bytes
from workers.http.response import Response
from workers.http.selectors import Selector

VOID = frozenset(
    ["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr"]
)


class Token(Named):
    """A part of the page, with the text that is inserted around it or that replaces it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._before: list[str] = []
        self._after: list[str] = []
        self.removed = False

    def before(self, content: Any, options: Any = None, **named: Any) -> "Token":
        self._before.append(_markup(content, options, named))
        return self

    def after(self, content: Any, options: Any = None, **named: Any) -> "Token":
        self._after.insert(0, _markup(content, options, named))
        return self

    def replace(self, content: Any, options: Any = None, **named: Any) -> "Token":
        self.removed = True
        self._before.append(_markup(content, options, named))
        return self

    def remove(self) -> "Token":
        self.removed = True
        return self

    def _text(self) -> str:
        return "".join(self._before) + ("" if self.removed else self._source) + "".join(self._after)


class Comment(Token):
    def __init__(self, text: str) -> None:
        super().__init__(f"<!--{text}-->")
        self.text = text

    def _text(self) -> str:
        self._source = f"<!--{self.text}-->"
        return super()._text()


class Text(Token):
    def __init__(self, text: str, *, is_last: bool) -> None:
        super().__init__(text)
        self.text = text
        self.last_in_text_node = is_last


class EndTag(Token):
    def __init__(self, name: str) -> None:
        super().__init__(f"</{name}>")
        self.name = name


class Element(Token):
    """A start tag; the element's content and end tag are not read yet."""

    def __init__(self, tag: str, attributes: list[tuple[str, str | None]], source: str, position: int) -> None:
        super().__init__(source)
        self.tag = tag
        self.position = position
        self.namespace_uri = "http://www.w3.org/1999/xhtml"
        self._attributes = dict(attributes)
        self._has_changed = self._keeps_content = False
        self._prepended: list[str] = []
        self._appended: list[str] = []
        self._inner: str | None = None
        self._end_handlers: list[Any] = []
        self.children = 0

    @property
    def tag_name(self) -> str:
        return self.tag

    @property
    def attributes(self) -> Items:
        return Items(Items((name, value or "")) for name, value in self._attributes.items())

    def attribute(self, name: str) -> str | None:
        name = name.lower()
        return (self._attributes[name] or "") if name in self._attributes else None

    get_attribute = attribute

    def has_attribute(self, name: str) -> bool:
        return name.lower() in self._attributes

    def set_attribute(self, name: str, value: Any) -> "Element":
        self._attributes[name.lower()], self._has_changed = str(value), True
        return self

    def remove_attribute(self, name: str) -> "Element":
        self._has_changed = self._attributes.pop(name.lower(), None) is not None or self._has_changed
        return self

    def prepend(self, content: Any, options: Any = None, **named: Any) -> "Element":
        self._prepended.insert(0, _markup(content, options, named))
        return self

    def append(self, content: Any, options: Any = None, **named: Any) -> "Element":
        self._appended.append(_markup(content, options, named))
        return self

    def set_inner_content(self, content: Any, options: Any = None, **named: Any) -> "Element":
        self._inner = _markup(content, options, named)
        return self

    def remove_and_keep_content(self) -> "Element":
        self.removed = self._keeps_content = True
        return self

    def on_end_tag(self, handler: Any) -> None:
        self._end_handlers.append(handler)

    @property
    def _hides_content(self) -> bool:
        return self._inner is not None or (self.removed and not self._keeps_content)

    def _start(self) -> str:
        tag = "" if self.removed else self._start_tag()
        inner = self._inner if self._inner is not None and not self.removed else ""
        return (
            "".join(self._before)
            + tag
            + ("" if self._hides_content and not inner else "".join(self._prepended) + inner)
        )

    def _start_tag(self) -> str:
        if not self._has_changed:
            return self._source
        pairs = (f' {k}="{escape(v)}"' if v is not None else f" {k}" for k, v in self._attributes.items())
        return f"<{self.tag}{''.join(pairs)}{' /' if self._source.endswith('/>') else ''}>"


class HTMLRewriter:
    def __init__(self) -> None:
        self._elements: list[tuple[Selector, Any]] = []
        self._documents: list[Any] = []

    @classmethod
    def new(cls) -> "HTMLRewriter":
        return cls()

    def on(self, selector: str, handler: Any) -> "HTMLRewriter":
        """Add a handler for elements: `element`, `comments` and `text`, as methods or in a dict, all optional."""
        self._elements.append((Selector(selector), handler))
        return self

    def on_document(self, handler: Any) -> "HTMLRewriter":
        """Add a handler for the document: `doctype`, `comments`, `text` and `end`, all optional."""
        self._documents.append(handler)
        return self

    onDocument = on_document

    def transform(self, response: Any) -> Response:
        """Return a response whose body is rewritten as it is read."""
        whole, stream = response.taken()
        headers = response.headers.multi_items()
        kept = [pair for pair in headers if pair[0] not in ("content-length", "content-encoding")]
        pieces = _once(whole) if stream is None else stream
        body = None if whole is None and stream is None else self._rewritten(pieces)
        return Response(body, response.status, response.status_text, kept, url=response.url)

    async def _rewritten(self, pieces: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        page, decoder = _Page(self._elements, self._documents), codecs.getincrementaldecoder("utf-8")("replace")
        async for piece in pieces:
            if text := await page.fed(decoder.decode(as_bytes(piece))):
                yield text.encode()
        yield (await page.ended(decoder.decode(b"", True))).encode()


class _Page(HTMLParser):
    """One page that is being rewritten.
    The parser only records what it finds. Handlers run afterwards, because they may await."""

    def __init__(self, elements: list[tuple[Selector, Any]], documents: list[Any]) -> None:
        super().__init__(convert_charrefs=False)
        self._elements, self._documents = elements, documents
        self._path: list[Element] = []
        self._found: list[tuple[Any, ...]] = []
        self._roots = 0
        self._out: list[str] = []

    async def fed(self, text: str) -> str:
        self.feed(text)
        return await self._written()

    async def ended(self, text: str) -> str:
        self.feed(text)
        self.close()
        await self._handle()
        for handler in self._documents:
            token = _DocumentEnd()
            await _call(handler, "end", token)
            self._out += token._appended
        return await self._written()

    async def _written(self) -> str:
        await self._handle()
        text, self._out = "".join(self._out), []
        return text

    # -- called by the parser --------------------------------------------------------------------------------------------------------

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._found.append(("start", tag, attrs, self.get_starttag_text() or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        self._found.append(("end", tag))

    def handle_data(self, data: str) -> None:
        self._found.append(("text", data))

    def handle_entityref(self, name: str) -> None:
        self._found.append(("text", f"&{name};"))

    def handle_charref(self, name: str) -> None:
        self._found.append(("text", f"&#{name};"))

    def handle_comment(self, data: str) -> None:
        self._found.append(("comment", data))

    def handle_decl(self, decl: str) -> None:
        self._found.append(("doctype", f"<!{decl}>"))

    def unknown_decl(self, data: str) -> None:
        self._found.append(("doctype", f"<![{data}]>"))

    def handle_pi(self, data: str) -> None:
        self._found.append(("doctype", f"<?{data}>"))

    # -- changes of the element ----------------------------------------------------------------------------------------------------------

    async def _handle(self) -> None:
        found, self._found = self._found, []
        for index, (kind, *rest) in enumerate(found):
            if kind == "start":
                await self._begin(*rest)
            elif kind == "end":
                await self._end(rest[0])
            elif kind == "doctype":
                self._emit(rest[0])
            elif kind == "comment":
                await self._pass("comments", Comment(rest[0]))
            else:
                is_last = index + 1 == len(found) or found[index + 1][0] != "text"
                await self._pass("text", Text(rest[0], is_last=is_last))

    async def _begin(self, tag: str, attributes: list[tuple[str, str | None]], source: str) -> None:
        if self._path:
            self._path[-1].children += 1
            position = self._path[-1].children
        else:
            self._roots += 1
            position = self._roots
        element = Element(tag, attributes, source, position)
        path = [*self._path, element]
        for selector, handler in self._elements:
            if not self._is_hidden and selector.matches(path):
                await _call(handler, "element", element)
        self._emit(element._start())
        if tag in VOID:
            self._emit("".join(element._after))
        else:
            self._path.append(element)

    async def _end(self, tag: str) -> None:
        if all(element.tag != tag for element in self._path):
            return self._emit(f"</{tag}>")
        while self._path:
            element = self._path.pop()
            if element.tag == tag:
                return await self._close(element, f"</{tag}>")
            await self._close(element, "")  # the end tag was omitted

    async def _close(self, element: Element, source: str) -> None:
        end = EndTag(element.tag)
        end._source = source
        for handler in element._end_handlers:
            await _call(handler, "", end)
        if not element._hides_content or element._inner is not None:
            self._emit("".join(element._appended))
        self._emit(end._text() if not element.removed else "")
        self._emit("".join(element._after))

    async def _pass(self, kind: str, token: Token) -> None:
        if self._is_hidden:
            return
        for selector, handler in self._elements:
            if _has(handler, kind) and any(selector.matches(self._path[:end]) for end in range(1, len(self._path) + 1)):
                await _call(handler, kind, token)
        for handler in self._documents:
            await _call(handler, kind, token)
        self._emit(token._text())

    @property
    def _is_hidden(self) -> bool:
        return any(element._hides_content for element in self._path)

    def _emit(self, text: str) -> None:
        if text and not self._is_hidden:
            self._out.append(text)


class _DocumentEnd(Named):
    def __init__(self) -> None:
        self._appended: list[str] = []

    def append(self, content: Any, options: Any = None, **named: Any) -> "_DocumentEnd":
        self._appended.append(_markup(content, options, named))
        return self


def _has(handler: Any, name: str) -> bool:
    return (handler.get(name) if isinstance(handler, dict) else getattr(handler, name, None)) is not None


async def _call(handler: Any, name: str, token: Any) -> None:
    """Call the handler's function `name`, if there is one; with an empty name, call the handler itself."""
    function = handler if not name else handler.get(name) if isinstance(handler, dict) else getattr(handler, name, None)
    if function is not None and inspect.isawaitable(result := function(token)):
        await result


def _markup(content: Any, options: Any, named: dict[str, Any]) -> str:
    given = {**(options or {}), **named}
    return str(content) if given.get("html") else escape(str(content), quote=False)


async def _once(whole: bytes | None) -> AsyncIterator[bytes]:
    yield whole or b""
