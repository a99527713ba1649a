"""Headers as in the Fetch standard: names ignore case and may have several values.

A missing header is None, as in the platform's SDK.
"""

from collections.abc import ItemsView, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

HeadersInit = Mapping[str, Any] | Iterable[tuple[str, Any]] | None


class Headers(MutableMapping[str, Any]):
    def __init__(self, init: HeadersInit = None) -> None:
        self._pairs: list[tuple[str, str]] = []  # names in lower case
        if isinstance(init, Headers):
            self._pairs = list(init._pairs)
        elif init is not None:
            pairs = init.items() if isinstance(init, Mapping) else init
            for pair in pairs if not isinstance(pairs, str) else [pairs]:
                if isinstance(pair, str) or len(pair) != 2:
                    raise TypeError(f"headers are a dict, or pairs of a name and a value, and not {str(init)[:80]!r}")
                self.append(*pair)

    @classmethod
    def new(cls, init: HeadersInit = None) -> "Headers":
        return cls(init)

    def append(self, name: str, value: Any) -> None:
        self._pairs.append((_checked_name(name), _checked_value(name, value)))

    def set(self, name: str, value: Any) -> None:
        self[name] = value

    def has(self, name: str) -> bool:
        return name in self

    def delete(self, name: str) -> None:
        lower = name.lower()
        self._pairs = [pair for pair in self._pairs if pair[0] != lower]

    def get_all(self, name: str, failobj: Any = None) -> Any:
        """Return the values of a name; all but set-cookie are joined by commas into one."""
        found = self._values(name)
        if len(found) > 1 and name.lower() != "set-cookie":
            found = [", ".join(found)]
        return found or ([] if failobj is None else failobj)

    def get_set_cookie(self) -> list[str]:
        return list(self.get_all("set-cookie"))

    def items(self) -> ItemsView[str, Any]:
        """Return pairs of names and values; each cookie of set-cookie is a pair."""
        return _HeaderItems(self)

    def entries(self) -> list[tuple[str, str]]:
        return list(self.items())

    def multi_items(self) -> list[tuple[str, str]]:
        """Return all (name, value) pairs in the order in which they were added."""
        return list(self._pairs)

    def get(self, name: str, default: Any = None) -> Any:
        found = self._values(name)
        return ", ".join(found) if found else default

    def _values(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name.lower()]

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, default: Any = None) -> Any:
        value = self.get(name, default)
        self.delete(name)
        return value

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        pair = _checked_name(name), _checked_value(name, value)
        self.delete(name)
        self._pairs.append(pair)

    __delitem__ = delete

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(key == name.lower() for key, _ in self._pairs)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(key for key, _ in self._pairs))

    def __len__(self) -> int:
        return len({key for key, _ in self._pairs})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __repr__(self) -> str:
        return f"Headers({self._pairs!r})"

    getAll, getSetCookie = get_all, get_set_cookie


class _HeaderItems(ItemsView[str, Any]):
    def __init__(self, headers: Headers) -> None:
        super().__init__(headers)
        self._headers = headers

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name in self._headers for value in self._headers.get_all(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name or any(c <= " " or c in '()<>@,;:\\"/[]?={}' or c > "~" for c in name):
        raise TypeError(f"{name!r} cannot be the name of a header")
    return name.lower()


def _checked_value(name: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)  # booleans in JavaScript's spelling
    if any(c in "\r\n\0" for c in text):
        raise TypeError(f"the value of the header {name!r} has a line break in it")
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        raise TypeError(f"the value of the header {name!r} has characters beyond Latin-1; encode it") from None
    return text.strip(" \t")
