"""A fake of Mooncake Store: the methods of its package over a dict; they can be made to fail or hang."""

import ctypes
import threading
from collections.abc import Sequence

MISSING, TOO_LARGE, NO_MASTER, FULL = -704, -600, -900, -200


class FakeStore:
    """A store that all members share; it is also the object through which each member uses it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.limit = 1 << 30  # bytes of values
        self.is_gone = False  # as if its master did not respond
        self.may_register = True
        self.registered: dict[int, int] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asked = threading.Event()

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        self._arrive()
        return [-1 if self.is_gone else int(key in self.values) for key in keys]

    def batch_get_into(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        self._arrive()
        assert all(self._reaches(*each) for each in zip(addresses, sizes, strict=True)), "not registered"
        return [self._get(*each) for each in zip(keys, addresses, sizes, strict=True)]

    def batch_put_from(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        self._arrive()
        assert all(self._reaches(*each) for each in zip(addresses, sizes, strict=True)), "not registered"
        return [self._put(*each) for each in zip(keys, addresses, sizes, strict=True)]

    def put(self, key: str, value: bytes) -> int:
        if self.is_gone or len(self.values) >= self.limit:
            return NO_MASTER if self.is_gone else FULL
        self.values.setdefault(key, value)
        return 0

    def get(self, key: str) -> bytes:
        return b"" if self.is_gone else self.values.get(key, b"")

    def remove(self, key: str, force: bool) -> int:
        return 0 if self.values.pop(key, None) is not None else MISSING

    def register_buffer(self, address: int, num_bytes: int) -> int:
        if not self.may_register:
            return NO_MASTER
        self.registered[address] = num_bytes
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0 if self.registered.pop(address, 0) else MISSING

    def close(self) -> int:
        return 0

    def _arrive(self) -> None:
        self.asked.set()
        assert self.may_answer.wait(60)

    def _reaches(self, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + length for start, length in self.registered.items())

    def _get(self, key: str, address: int, size: int) -> int:
        value = self.values.get(key)
        if self.is_gone or value is None:
            return NO_MASTER if self.is_gone else MISSING
        if len(value) > size:
            return TOO_LARGE
        ctypes.memmove(address, value, len(value))
        return len(value)

    def _put(self, key: str, address: int, size: int) -> int:
        return self.put(key, ctypes.string_at(address, size))
