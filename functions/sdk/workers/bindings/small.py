"""Small bindings: Analytics Engine, secrets stores, Hyperdrive, and kinds that are not offered."""

from typing import Any
from urllib.parse import unquote, urlsplit

from workers.entrypoint import wait_until
from workers.face import Face, Named, options_of

_COLUMNS: dict[str, tuple[int, tuple[type, ...], str]] = {
    "blobs": (20, (str, bytes), "str and bytes"),
    "doubles": (20, (int, float), "numbers"),
    "indexes": (1, (str, bytes), "str and bytes"),
}


class AnalyticsEngine(Face):
    def write_data_point(self, point: Any = None, **named: Any) -> None:
        """Write a data point of `blobs`, `doubles` and `indexes`.
        Returns at once; the point is written after the response."""
        given = options_of(point, named, tuple(_COLUMNS), "writeDataPoint")
        for name, values in given.items():
            most, kinds, said = _COLUMNS[name]
            if not isinstance(values, (list, tuple)):
                raise TypeError(f"writeDataPoint: {name} is a list, and not {type(values).__name__}")
            if len(values) > most:
                raise TypeError(f"writeDataPoint: {name} has at most {most} values, and not {len(values)}")
            if bad := [value for value in values if value is not None and not isinstance(value, kinds)]:
                raise TypeError(f"writeDataPoint: {name} has {said}, and not {type(bad[0]).__name__}")
        texts: dict[str, Any] = {
            name: [_as_text(value) for value in given[name]] for name in ("blobs", "indexes") if name in given
        }
        given.update(texts)
        wait_until(self._call("write", **given))


def _as_text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class StoredSecret(Face):
    async def get(self) -> str:
        """Return the current value of the secret."""
        value: str = await self._call("get")
        return value


class Hyperdrive(Named):
    """The address of an external database, for a driver that uses sockets; without pooling and caching."""

    def __init__(self, channel: Any, name: str, options: Any) -> None:
        text = options.get("localConnectionString") or ""
        if not text:
            raise ValueError(f"{name}: set hyperdrive.localConnectionString; ids of Hyperdrive are not supported")
        url = urlsplit(text)
        self.connection_string = text
        self.host, self.port = url.hostname or "localhost", url.port or (3306 if url.scheme == "mysql" else 5432)
        self.user, self.password = unquote(url.username or ""), unquote(url.password or "")
        self.database = url.path.lstrip("/")


class NotOffered:
    """A binding of a kind that is not offered here: every use raises an error."""

    def __init__(self, channel: Any, name: str, options: Any) -> None:
        self._sentence = f"{name} is a binding of the kind {options['kind']!r}, which is not offered here"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(self._sentence)

    def __repr__(self) -> str:
        return f"<{self._sentence}>"
