"""Objects with `fetch` and other methods: assets, service bindings, and stubs of Durable Objects."""

from collections.abc import Callable
from typing import Any

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.failure import Failure
from workers.face import Channel, Face
from workers.http import outbound  # imported as whole modules, because they import the bindings, too
from workers.http.request import Request
from workers.http.response import response_of
from workers.http.streams import ByteStream
from workers.remote.rpc_session import SESSION, RpcSession
from workers.sockets import joints
from workers.trouble import remote_error


class Fetcher(Face):
    __is_stub__ = True  # marks values that may be passed on to other functions

    async def fetch(self, resource: Any, options: Any = None, **named: Any) -> Any:
        """Send a request: `fetch(url_or_request, method=, headers=, body=)`; return the Response."""
        return await fetched(self._channel, self._name, {}, resource, options, named)


class Service(Fetcher):
    """Another function. Every name that is not a method here is a method of its entrypoint."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return remote_method(self._channel, self._name, name, {})


def remote_method(channel: Channel, binding: str, name: str, further: dict[str, Any]) -> Callable[..., Any]:
    async def call(*args: Any, **kwargs: Any) -> Any:
        session = RpcSession()
        packed = session.pack(list(args), f"{name}'s arguments"), session.pack(kwargs, f"{name}'s arguments")
        sent = {"name": name, "args": packed[0], "kwargs": packed[1], **further}
        try:
            answer = await channel.begin(binding, "rpc", (), sent, session.outgoing())
            value = answer.value
            if value == {SESSION: True}:
                return await session.result(answer.body)
        except Failure as failure:
            session.close(failure)
            raise remote_error(failure) from None
        if isinstance(value, dict) and value.keys() == {frames.RESPONSE}:
            return response_of(value[frames.RESPONSE], answer.body)
        return session.unpack(value).value if answer.body is None else ByteStream(answer.body)

    call.__name__ = call.__qualname__ = name
    return call


async def fetched(
    channel: Channel, binding: str, further: dict[str, Any], resource: Any, options: Any, named: dict[str, Any]
) -> Any:
    is_whole = isinstance(resource, Request) and not options and not named
    request = resource if is_whole else Request(resource, options, **named)
    whole, stream = request.taken()
    sent = {
        "method": str(request.method),
        "url": request.url,
        "headers": [list(pair) for pair in request.headers.multi_items()],
        "body": whole or b"",
        **further,
    }
    joint = joints.Joint() if joints.asks_for_socket(request.headers) else None
    if joint is not None:
        stream, sent = joint.body, {**sent, "web_socket": True}
    return await outbound.answered(channel.begin(binding, "fetch", (), sent, stream), joint, request.signal)
