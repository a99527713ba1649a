"""The Durable Objects of this isolate: one instance per class and id, created by its first event.

An event starts only while its object's gate is open; `blockConcurrencyWhile` and transactions close the gate. An instance is discarded if its storage
fails or now belongs to another instance: its events fail with the reason, and the next event creates a new instance.
"""

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pilotlight.functions.channel.exchanges import ignore_result
from pilotlight.functions.channel.failure import Failure
from workers import host
from workers.bindings.durable_objects import DurableObjectId
from workers.durable.storage import Asker, Storage
from workers.entrypoint import Context, DurableObject
from workers.face import snake_case
from workers.sockets.object_sockets import ObjectSockets

T = TypeVar("T")
# Maximum number of instances. To create another, the least recently used ones that have no running event and no open WebSocket are evicted. Their
# state remains stored.
MAX_IDLE = 1000
BLOCK_LIMIT_S = 30.0


class ObjectContext(Context):
    """`self.ctx` of a Durable Object."""

    def __init__(self, instance: "Instance", class_name: str, id: DurableObjectId, storage: Storage) -> None:
        super().__init__()
        self.id = id
        self._object = class_name, str(id)
        self.storage = storage
        self._instance = instance

    def block_concurrency_while(self, callback: Any) -> Awaitable[Any]:
        """Start no other event of this object until the callback has finished.
        The result may be awaited, or not, as in a constructor."""
        return self._instance.block(callback)

    def abort(self, reason: Any = None) -> None:
        """Discard this instance and its uncommitted writes."""
        error = Failure(f"the Durable Object aborted itself: {reason}", code="object_aborted")
        self._instance.reset(error)
        raise error

    blockConcurrencyWhile = block_concurrency_while

    def accept_web_socket(self, socket: Any, tags: Any = ()) -> None:
        """Accept a WebSocket.
        Its messages call the object's `webSocketMessage`, its end calls `webSocketClose`."""
        self._instance.sockets.accept(socket, tags)

    def get_web_sockets(self, tag: Any = None) -> list[Any]:
        """Return the open WebSockets, all or those with a tag."""
        return self._instance.sockets.open(tag)

    def get_tags(self, socket: Any) -> list[str]:
        return self._instance.sockets.tags(socket)

    def set_web_socket_auto_response(self, pair: Any = None) -> None:
        self._instance.sockets.answer_automatically(pair)

    def get_web_socket_auto_response(self) -> Any:
        return self._instance.sockets.auto_response

    def get_web_socket_auto_response_timestamp(self, socket: Any) -> Any:
        return self._instance.sockets.answered_at(socket)

    acceptWebSocket, getWebSockets, getTags = accept_web_socket, get_web_sockets, get_tags
    accept_websocket, get_websockets = accept_web_socket, get_web_sockets  # both spellings are in use
    setWebSocketAutoResponse, getWebSocketAutoResponse = set_web_socket_auto_response, get_web_socket_auto_response
    getWebSocketAutoResponseTimestamp = get_web_socket_auto_response_timestamp

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the context of a Durable Object has no {name!r}", name=name, obj=self)


class Instance:
    def __init__(self, class_name: str, id: str, name: str | None) -> None:
        self.events = 0
        self.broken: BaseException | None = None
        self._target: Any = None
        self._holds = 0
        self._opened = asyncio.Event()
        self._opened.set()
        self._broke = asyncio.Event()
        self._asker = Asker(class_name, id, self)
        self.sockets = ObjectSockets(self._event)
        self.context = ObjectContext(self, class_name, DurableObjectId(id, name), Storage(self._asker))

    def construct(self, kind: type[DurableObject]) -> None:
        """Instantiate the author's class. Raises its constructor's exceptions."""
        self._target = kind(self.context, host.env)

    async def run(self, act: Callable[[Any], Awaitable[T]]) -> T:
        """Run one event. Its result is returned only after its writes are on disk."""
        self.events += 1
        try:
            value = await self._until_broken(self._started(act))
            self._asker.flush()
            self._check()
            return value
        finally:
            self.events -= 1

    @property
    def is_unused(self) -> bool:
        return not self.events and not self.sockets.open()

    def hold(self) -> None:
        self._holds += 1
        self._opened.clear()

    def release(self) -> None:
        self._holds -= 1
        if not self._holds:
            self._opened.set()

    def block(self, callback: Any) -> "asyncio.Task[Any]":
        self.hold()
        task = asyncio.ensure_future(self._blocked(callback))
        task.add_done_callback(ignore_result)
        return task

    def reset(self, why: BaseException) -> None:
        if self.broken is None:
            self.broken = why
            self._asker.abandon()
            self.sockets.close()
            self._broke.set()
            self._opened.set()

    async def _started(self, act: Callable[[Any], Awaitable[T]]) -> T:
        """Wait for the gate, then start the event at once, so that nothing can close the gate in between."""
        while not self._opened.is_set():
            await self._opened.wait()
        self._check()
        host.event_runner.set(self._later)
        host.listening_sockets.set(self.sockets.listening)
        return await act(self._target)

    async def _later(self, act: Callable[[], Awaitable[Any]]) -> Any:
        return await self.run(lambda target: act())

    async def _event(self, name: str, *arguments: Any) -> None:
        """Call the method of this name as an event, if the class has it."""

        async def act(target: Any) -> None:
            method = getattr(target, name, None) or getattr(target, snake_case(name), None)
            if method is not None:
                result = method(*arguments)
                if inspect.isawaitable(result):
                    await result

        await self.run(act)

    async def _blocked(self, callback: Any) -> Any:
        try:
            async with asyncio.timeout(BLOCK_LIMIT_S):
                value = callback() if callable(callback) else callback
                return await value if inspect.isawaitable(value) else value
        except BaseException as error:
            if isinstance(error, TimeoutError):
                error = Failure(f"blockConcurrencyWhile took more than {BLOCK_LIMIT_S:g} s", code="object_reset")
            self.reset(error)
            raise error from None
        finally:
            self.release()

    async def _until_broken(self, work: Awaitable[T]) -> T:
        """Run an event until it ends or the instance is discarded; later writes would be refused."""
        task, broke = asyncio.ensure_future(work), asyncio.ensure_future(self._broke.wait())
        try:
            await asyncio.wait({task, broke}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            self._check()
            raise AssertionError("broken without a reason")
        finally:
            broke.cancel()
            task.cancel()

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken


class Objects:
    def __init__(self) -> None:
        self._instances: OrderedDict[tuple[str, str], Instance] = OrderedDict()

    async def run(self, kind: Any, options: dict[str, Any], act: Callable[[Any], Awaitable[T]]) -> T:
        """Run an event for the object that `options` names.
        `kind` is the module's attribute with the class's name."""
        class_name, id, name = str(options["object"]), str(options.get("id", "")), options.get("name")
        if not (isinstance(kind, type) and issubclass(kind, DurableObject)):
            kind_of, _, workflow = class_name.rpartition("$")
            wanted = f"{workflow}(WorkflowEntrypoint)" if kind_of else f"{class_name}(DurableObject)"
            raise Failure(f"the module has no `class {wanted}`", code="no_handler", name="TypeError")
        instance = self._instance(kind, class_name, id, name)
        self._instances.move_to_end((class_name, id))
        try:
            return await instance.run(act)
        finally:
            if instance.broken is not None and self._instances.get((class_name, id)) is instance:
                del self._instances[(class_name, id)]

    def _instance(self, kind: type[DurableObject], class_name: str, id: str, name: Any) -> Instance:
        instance = self._instances.get((class_name, id))
        if instance is None or instance.broken is not None:
            self._forget_unused()
            instance = Instance(class_name, id, name if isinstance(name, str) else None)
            try:
                instance.construct(kind)
            except BaseException as error:
                instance.reset(error)  # rolls back the writes of the failed constructor
                raise
            self._instances[(class_name, id)] = instance
        return instance

    def _forget_unused(self) -> None:
        if len(self._instances) >= MAX_IDLE:
            unused = [key for key, instance in self._instances.items() if instance.is_unused]
            for key in unused[: len(self._instances) - MAX_IDLE + 1]:
                del self._instances[key]
