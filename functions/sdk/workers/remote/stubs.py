"""RpcTarget, whose methods other functions may call, and the stubs that call them."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Protocol


class RpcTarget:
    """The base of objects that are sent by reference.
    The receiver gets a stub with their methods and properties."""


class Remote(Protocol):
    """The remote object that a stub refers to."""

    def call(self, name: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Awaitable[Any]:
        """Call the object, or one of its methods."""

    def read(self, name: str) -> Awaitable[Any]: ...

    def release(self) -> None: ...


class Handle:
    """A reference to a remote object, shared by stubs; the object is released with the last stub."""

    def __init__(self, remote: Remote) -> None:
        self.remote = remote
        self._loop = asyncio.get_running_loop()
        self._holders = 0

    def hold(self) -> None:
        self._holders += 1

    def release(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            self.remote.release()

    def release_soon(self) -> None:
        """Release in the event loop, because the garbage collector may call this in any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.release)


class RpcStub:
    """A function or RpcTarget of another function.

    `await stub(...)`, `await stub.method(...)`, `await stub.property`.

    A stub that came as an argument is released when the call returns, unless `dup` was called; any other stub is released by `dispose`, at the end of
    `with stub:`, or with the last reference.
    """

    def __init__(self, handle: Handle) -> None:
        handle.hold()
        self._handle: Handle | None = handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._remote().call(None, args, kwargs)

    def dup(self) -> "RpcStub":
        """Return another stub of the same object, valid until it is disposed of."""
        self._remote()
        assert self._handle is not None
        return RpcStub(self._handle)

    def dispose(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.release()

    def __enter__(self) -> "RpcStub":
        return self

    def __exit__(self, *_: object) -> None:
        self.dispose()

    def __getattr__(self, name: str) -> "Member":
        if name.startswith("_"):
            raise AttributeError(f"'RpcStub' object has no attribute {name!r}", name=name, obj=self)
        return Member(self, name)

    def __del__(self) -> None:
        if (handle := self.__dict__.get("_handle")) is not None:
            handle.release_soon()

    def _remote(self) -> Remote:
        if self._handle is None:
            sentence = (
                "this stub was disposed of: an argument is valid until the method returns; keep a copy by stub.dup()"
            )
            raise RuntimeError(sentence)
        return self._handle.remote


class Member:
    """A name on a stub: call it as a method, or await it as a property."""

    def __init__(self, stub: RpcStub, name: str) -> None:
        self._stub = stub
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stub._remote().call(self._name, args, kwargs)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._stub._remote().read(self._name).__await__()


Runner = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]
