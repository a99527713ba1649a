"""JavaScript's typed arrays and DataView, as mutable bytes: accepted wherever bytes are.

Parts of an array (`subarray`) and its `buffer` are copies, while JavaScript's share memory.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from workers.face import Buffer


class TypedArray(bytearray):
    """Numbers of one type; indices and lengths count numbers, as in JavaScript."""

    CODE: ClassVar[str] = "B"  # the type's letter in `struct` and memoryview

    def __init__(self, source: Any = 0) -> None:
        """Make an array; `source` is a length, a buffer with the numbers' bytes, or the numbers."""
        size = struct.calcsize(self.CODE)
        if isinstance(source, int):
            super().__init__(source * size)
        elif isinstance(source, Buffer) or (self.CODE == "B" and isinstance(source, (bytes, memoryview))):
            if len(source) % size:
                raise ValueError(
                    f"a buffer for {type(self).__name__} has a multiple of {size} bytes, not {len(source)}"
                )
            super().__init__(source)
        else:
            super().__init__(b"".join(struct.pack(f"={self.CODE}", self._number(value)) for value in source))

    @classmethod
    def new(cls, source: Any = 0) -> "TypedArray":
        return cls(source)

    @classmethod
    def of(cls, *values: Any) -> "TypedArray":
        return cls(values)

    @classmethod
    def _number(cls, value: Any) -> int | float:
        """Convert a number to the type; integers wrap around."""
        if cls.CODE in "fd":
            return float(value)
        bits = 8 * struct.calcsize(cls.CODE)
        wrapped = int(float(value)) % (1 << bits) if isinstance(value, (str, float)) else int(value) % (1 << bits)
        return wrapped - (1 << bits) if cls.CODE.islower() and wrapped >> (bits - 1) else wrapped

    @property
    def _view(self) -> Any:
        view: Any = memoryview(self)
        return view.cast(self.CODE)

    def __len__(self) -> int:
        return bytearray.__len__(self) // struct.calcsize(self.CODE)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._view.tolist())

    def __getitem__(self, index: Any) -> Any:
        return type(self)(self._view[index].tolist()) if isinstance(index, slice) else self._view[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        is_slice = isinstance(index, slice)
        self._view[index] = type(self)(value)._view if is_slice else self._number(value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self)})"

    @property
    def length(self) -> int:
        return len(self)

    @property
    def byteLength(self) -> int:
        return bytearray.__len__(self)

    @property
    def buffer(self) -> Buffer:
        return Buffer(memoryview(self))

    def set(self, values: Iterable[Any], offset: int = 0) -> None:
        given = type(self)(values)
        self[offset : offset + len(given)] = given

    def subarray(self, start: int = 0, end: int | None = None) -> Any:
        return self[start:end]

    slice = subarray

    def to_py(self, **_: Any) -> Any:
        return self._view

    def to_bytes(self) -> bytes:
        return bytes(memoryview(self))


setattr(TypedArray, "from", classmethod(lambda cls, values, *_: cls(list(values))))  # `from` is a keyword in Python


class Uint8Array(TypedArray):
    pass


class Uint8ClampedArray(TypedArray):
    @classmethod
    def _number(cls, value: Any) -> int:
        return round(min(255.0, max(0.0, float(value))))


class Int8Array(TypedArray):
    CODE = "b"


class Uint16Array(TypedArray):
    CODE = "H"


class Int16Array(TypedArray):
    CODE = "h"


class Uint32Array(TypedArray):
    CODE = "I"


class Int32Array(TypedArray):
    CODE = "i"


class BigUint64Array(TypedArray):
    CODE = "Q"


class BigInt64Array(TypedArray):
    CODE = "q"


class Float32Array(TypedArray):
    CODE = "f"


class Float64Array(TypedArray):
    CODE = "d"


class DataView(bytearray):
    """Numbers of any type at any position of a copy of a buffer; big-endian unless asked otherwise."""

    @classmethod
    def new(cls, buffer: Any, start: int = 0, length: int | None = None) -> "DataView":
        return cls(bytes(buffer)[start : None if length is None else start + length])

    @property
    def byteLength(self) -> int:
        return len(self)

    @property
    def buffer(self) -> Buffer:
        return Buffer(self)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kind = _BY_NAME.get(name[3:])
        if kind is None or name[:3] not in ("get", "set"):
            raise AttributeError(f"DataView has no {name!r}", name=name, obj=self)

        def get(offset: int, little_endian: bool = False) -> Any:
            return struct.unpack_from(("<" if little_endian else ">") + kind.CODE, self, offset)[0]

        def put(offset: int, value: Any, little_endian: bool = False) -> None:
            struct.pack_into(("<" if little_endian else ">") + kind.CODE, self, offset, kind._number(value))

        return get if name[:3] == "get" else put


_BY_NAME = {kind.__name__.removesuffix("Array"): kind for kind in TypedArray.__subclasses__()}
