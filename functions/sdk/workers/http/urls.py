"""URL and URLSearchParams as in JavaScript.

urllib splits and quotes; this module requires a host, and updates the other parts when one changes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, urlencode, urljoin, urlsplit

from pilotlight.wire.paths import without_dot_segments

DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443, "ftp": 21}
KEPT = "/:?#[]@!$&'()*+,;=%~|"  # characters that stay as they are, because a URL may be quoted already
# The part of a web URL, or of a relative one, in which a backslash means a slash.
_BEFORE_QUERY = re.compile(r"\A(?:(?:https?|wss?|ftp):[/\\]{2}|(?![a-z][a-z0-9+.-]*:))[^?#]*", re.IGNORECASE)


def quoted(url: str) -> str:
    """Percent-encode the non-ASCII characters, spaces and quotes of a URL, for use in a header."""
    parts = urlsplit(url)
    if not (host := parts.hostname or "").isascii():
        netloc = parts.netloc.replace(host, host.encode("idna").decode(), 1)
        url = parts._replace(netloc=netloc).geturl()
    return quote(url, safe=KEPT)


class URLSearchParams:
    def __init__(self, init: Any = "") -> None:
        if isinstance(init, str):
            self._pairs = parse_qsl(init.removeprefix("?"), keep_blank_values=True)
        else:
            pairs: Iterable[Any] = init.items() if isinstance(init, (Mapping, URLSearchParams)) else init
            self._pairs = [(str(name), str(value)) for name, value in pairs]

    @classmethod
    def new(cls, init: Any = "") -> "URLSearchParams":
        return cls(init)

    def get(self, name: str, default: Any = None) -> Any:
        return next((value for key, value in self._pairs if key == name), default)

    def getAll(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]

    def has(self, name: str) -> bool:
        return name in self

    def append(self, name: str, value: Any) -> None:
        self._pairs.append((name, str(value)))

    def set(self, name: str, value: Any) -> None:
        """Set a parameter; replace the first one of that name and delete the others."""
        pair, place = (name, str(value)), next((i for i, (key, _) in enumerate(self._pairs) if key == name), None)
        if place is None:
            self._pairs.append(pair)
        else:
            self._pairs[place] = pair
            self._pairs[place + 1 :] = [other for other in self._pairs[place + 1 :] if other[0] != name]

    def delete(self, name: str) -> None:
        self._pairs[:] = [pair for pair in self._pairs if pair[0] != name]

    def sort(self) -> None:
        self._pairs.sort(key=lambda pair: pair[0])

    def keys(self) -> list[str]:
        return [name for name, _ in self._pairs]

    def values(self) -> list[str]:
        return [value for _, value in self._pairs]

    def items(self) -> list[tuple[str, str]]:
        return list(self._pairs)

    entries = items

    @property
    def size(self) -> int:
        return len(self._pairs)

    def toString(self) -> str:
        return urlencode(self._pairs)

    def __getitem__(self, name: str) -> str | None:
        return self.get(name)  # type: ignore[no-any-return]

    def __setitem__(self, name: str, value: Any) -> None:
        self.set(name, value)

    def __contains__(self, name: object) -> bool:
        return any(key == name for key, _ in self._pairs)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.items())

    __str__ = toString


class URL:
    def __init__(self, url: Any, base: Any = None) -> None:
        text = _with_slashes(str(url).strip())
        self.searchParams = URLSearchParams()
        self._parts = _read(text if base is None else urljoin(URL(base).href, text))
        self._take_search(self._parts.query)

    @classmethod
    def new(cls, url: Any, base: Any = None) -> "URL":
        return cls(url, base)

    @staticmethod
    def canParse(url: Any, base: Any = None) -> bool:
        try:
            URL(url, base)
        except TypeError:
            return False
        return True

    @property
    def href(self) -> str:
        return quoted(self._parts._replace(query=self._query).geturl())

    @href.setter
    def href(self, url: str) -> None:
        self.__init__(url)  # type: ignore[misc]

    @property
    def origin(self) -> str:
        return f"{self.protocol}//{self.host}"

    @property
    def protocol(self) -> str:
        return f"{self._parts.scheme}:"

    @protocol.setter
    def protocol(self, protocol: str) -> None:
        self._parts = self._parts._replace(scheme=protocol.removesuffix(":"))

    @property
    def host(self) -> str:
        return self.hostname + (f":{self.port}" if self.port else "")

    @host.setter
    def host(self, host: str) -> None:
        self._at(host)

    @property
    def hostname(self) -> str:
        name = self._parts.hostname or ""  # urlsplit returns it in lower case
        return f"[{name}]" if ":" in name else name

    @hostname.setter
    def hostname(self, name: str) -> None:
        self._at(name + (f":{self.port}" if self.port else ""))

    @property
    def port(self) -> str:
        port = self._parts.port
        return "" if port is None or port == DEFAULT_PORTS.get(self._parts.scheme) else str(port)

    @port.setter
    def port(self, port: Any) -> None:
        self._at(self.hostname + (f":{port}" if str(port) else ""))

    @property
    def username(self) -> str:
        return self._parts.username or ""

    @property
    def password(self) -> str:
        return self._parts.password or ""

    @property
    def pathname(self) -> str:
        return quote(self._parts.path, safe=KEPT)

    @pathname.setter
    def pathname(self, path: str) -> None:
        path = path.replace("?", "%3F").replace("#", "%23")
        path = path if path.startswith(("/", "\\")) else f"/{path}"
        self._parts = self._parts._replace(path=without_dot_segments(path))

    @property
    def search(self) -> str:
        return f"?{self._query}" if self._query else ""

    @search.setter
    def search(self, search: str) -> None:
        self._take_search(search.removeprefix("?"))

    @property
    def hash(self) -> str:
        return f"#{self._parts.fragment}" if self._parts.fragment else ""

    @hash.setter
    def hash(self, fragment: str) -> None:
        self._parts = self._parts._replace(fragment=fragment.removeprefix("#"))

    def toString(self) -> str:
        return self.href

    toJSON = __str__ = toString

    def __repr__(self) -> str:
        return f"URL({self.href!r})"

    @property
    def _query(self) -> str:
        """Return the original query until a parameter is changed; then encode the parameters."""
        is_changed = self.searchParams.items() != self._read_pairs
        return self.searchParams.toString() if is_changed else quote(self._given, safe=KEPT)

    def _take_search(self, query: str) -> None:
        self._given = query
        self.searchParams._pairs[:] = parse_qsl(query, keep_blank_values=True)
        self._read_pairs = self.searchParams.items()

    def _at(self, host: str) -> None:
        user, at, _ = self._parts.netloc.rpartition("@")
        self._parts = _read(self._parts._replace(netloc=f"{user}{at}{host}").geturl())


def _with_slashes(url: str) -> str:
    return _BEFORE_QUERY.sub(lambda found: found[0].replace("\\", "/"), url)


def _read(text: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018 - raises ValueError for an invalid port
        host = parts.hostname or ""
        host = host if host.isascii() else host.encode("idna").decode()
    except ValueError as error:
        raise TypeError(f"{text!r} is no URL: {error}") from None
    if not parts.scheme or (parts.scheme in DEFAULT_PORTS and not host):
        raise TypeError(f"{text!r} is no URL: it begins with a scheme and a host, as https://example.com/ does")
    if parts.scheme not in DEFAULT_PORTS:
        return parts
    user, at, _ = parts.netloc.rpartition("@")
    host = f"[{host}]" if ":" in host else host
    port = "" if parts.port in (None, DEFAULT_PORTS[parts.scheme]) else f":{parts.port}"
    return parts._replace(netloc=f"{user}{at}{host}{port}", path=without_dot_segments(parts.path or "/"))
