"""Service bindings: call another function of this site by `fetch` or by a method, without a socket."""

from pathlib import Path
from typing import Any

import msgspec

from pilotlight.functions.bindings.assets.asset_files import FetchCall
from pilotlight.functions.bindings.binding import Binding, BindingError, Body, Functions, Services, method
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.channel.frames import UNNUMBERED, FetchEvent, RpcEvent
from pilotlight.functions.manifest import BindingDeclaration


class RpcCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Service(Binding):
    kind = "service"

    def __init__(self, functions: Functions, function: str, entrypoint: str, options: dict[str, Any]) -> None:
        self._functions = functions
        self._function = function
        self._entrypoint = entrypoint
        self._options = options

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "Service":
        if services.functions is None:
            raise BindingError(f"{declaration.name}: the site has no other functions to bind")
        options = declaration.options
        props = {"props": options["props"]} if options.get("props") else {}
        return cls(services.functions, options["service"], options.get("entrypoint") or "default", props)

    @method
    async def fetch(self, request: FetchCall, body: Body | None) -> Any:
        return await fetched(self._functions, self._function, self._entrypoint, request, body, self._options)

    @method
    async def rpc(self, request: RpcCall, body: Body | None) -> Any:
        return await called(self._functions, self._function, self._entrypoint, request, body, self._options)


async def fetched(
    functions: Functions,
    function: str,
    entrypoint: str,
    request: FetchCall,
    body: Body | None,
    options: dict[str, Any],
) -> Any:
    """Call `fetch` of a function; return its response in the form that a channel sends."""
    sent = (request.method, request.url, request.headers, request.body if body is None else b"")
    event = FetchEvent(UNNUMBERED, *sent, entrypoint=entrypoint, options=options)
    is_socket = request.web_socket and body is not None
    response = await functions.fetch(function, event, body, is_socket=is_socket)
    value = {"status": response.status, "headers": response.headers, "web_socket": response.status == 101}
    return StreamingReply(value, response.stream) if response.stream is not None else {**value, "body": response.body}


async def called(
    functions: Functions,
    function: str,
    entrypoint: str,
    request: RpcCall,
    body: Body | None,
    options: dict[str, Any],
) -> Any:
    """Call a method of a function; return its encoded result.
    `body` is the caller's side of an RPC session."""
    sent = (request.name, request.args, request.kwargs, body is not None)
    found = await functions.ask(function, RpcEvent(UNNUMBERED, entrypoint, *sent, options=options), body)
    return found.value if found.body is None else StreamingReply(found.value, found.body)
