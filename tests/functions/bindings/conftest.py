"""Fixtures that connect both halves of bindings by a real socket pair: the runtime's and the function's."""

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.bindings.binding import Services
from pilotlight.functions.bindings.registry import Bindings
from pilotlight.functions.channel.connection import Channel
from pilotlight.functions.channel.frames import BindingCall
from pilotlight.functions.channel.streams import Inbound
from pilotlight.functions.manifest import BindingDeclaration
from workers.bindings import open_face


@asynccontextmanager
async def channels(answer: Any) -> AsyncIterator[tuple[Channel, Channel]]:
    """Yield the runtime's channel and the function's channel."""
    ours, theirs = socket.socketpair()
    runtime = await Channel.open(ours, answer, is_runtime=True)
    function = await Channel.open(theirs, _refuse, is_runtime=False)
    try:
        yield runtime, function
    finally:
        runtime.close()
        function.close()
        await runtime.closed.wait()
        await function.closed.wait()


async def _refuse(frame: Any, body: Any) -> Any:
    raise AssertionError("nothing is asked of this function")


class Wired:
    """A function's side: `env` with the bindings by name, and the channel for sending hostile frames."""

    def __init__(
        self, declarations: list[BindingDeclaration], bindings: Bindings, channel: Channel, services: Services
    ) -> None:
        self.bindings = bindings
        self.channel = channel
        self.services = services
        self.env = {each.name: open_face(channel, each.kind, each.name, dict(each.options)) for each in declarations}

    async def raw(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.channel.call(name, method, *args, **kwargs)


Wire = Callable[..., Awaitable[Wired]]


@pytest.fixture
async def wire(tmp_path: Path) -> AsyncIterator[Wire]:
    """Return a function that opens declarations (kind, name, options) and connects them.
    State is in tmp_path, so a second call finds the data of the first."""
    async with AsyncExitStack() as scopes:

        async def make(*declarations: tuple[str, str, dict[str, Any]], **given: Any) -> Wired:
            services = Services(**given)
            declared = [BindingDeclaration(*each) for each in declarations]
            bindings = Bindings(declared, tmp_path, services)

            async def answer(frame: Any, body: Inbound | None) -> Any:
                assert isinstance(frame, BindingCall)
                return await bindings.answer(frame, body)

            scopes.push_async_callback(services.databases.close)
            scopes.push_async_callback(bindings.close)
            _, function = await scopes.enter_async_context(channels(answer))
            return Wired(declared, bindings, function, services)

        yield make
