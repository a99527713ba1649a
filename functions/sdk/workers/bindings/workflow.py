"""Workflows in functions: a binding that creates instances, and the status and events of instances."""

import uuid
from collections.abc import Iterable
from typing import Any

from pilotlight.functions.channel.failure import Failure
from workers.bindings.durable_objects import id_of_name
from workers.bindings.service import remote_method
from workers.face import Face, Items, Named, Record, options_of


class WorkflowInstance(Named):
    def __init__(self, workflow: "Workflow", id: str) -> None:
        self._workflow = workflow
        self.id = id

    async def status(self) -> Record:
        """Return {status, error, output}."""
        status: Record = await self._workflow._ask(self.id, "status")
        return status

    async def pause(self) -> None:
        await self._workflow._ask(self.id, "pause")

    async def resume(self) -> None:
        await self._workflow._ask(self.id, "resume")

    async def restart(self) -> None:
        await self._workflow._ask(self.id, "restart")

    async def terminate(self) -> None:
        await self._workflow._ask(self.id, "terminate")

    async def send_event(self, event: Any = None, **named: Any) -> None:
        """Send the instance an event with `type` and `payload`."""
        given = options_of(event, named, ("type", "payload"), "Workflow sendEvent")
        if "type" not in given:
            raise TypeError("Workflow sendEvent takes an event with a type")
        await self._workflow._ask(self.id, "send_event", given["type"], given.get("payload"))

    def __repr__(self) -> str:
        return f"<WorkflowInstance {self.id}>"


class Workflow(Face):
    async def create(self, options: Any = None, **named: Any) -> WorkflowInstance:
        """Create and start an instance; `id` (optional) and `params` are options."""
        given = options_of(options, named, ("id", "params", "retention"), "Workflow create")
        id = str(given.get("id", uuid.uuid4()))
        if not 1 <= len(id) <= 100 or not id.replace("-", "").replace("_", "").isalnum():
            raise TypeError(f"(instance.invalid_id) an id has 1 to 100 letters, digits, - and _, and not {id[:120]!r}")
        await self._ask(id, "create", self._options["name"], id, given.get("params", {}))
        return WorkflowInstance(self, id)

    async def create_batch(self, batch: Iterable[Any]) -> Items:
        return Items([await self.create(options) for options in batch])

    async def get(self, id: str) -> WorkflowInstance:
        """Return an existing instance. Raises an error if there is none."""
        if not await self._ask(str(id), "exists"):
            sentence = f"(instance.not_found) {self._options['name']} has no instance {str(id)[:120]!r}"
            raise Failure(sentence, code="not_found", status=404)
        return WorkflowInstance(self, str(id))

    async def _ask(self, id: str, method: str, *arguments: Any) -> Any:
        further = {"id": id_of_name(id), "object_name": id}
        return await remote_method(self._channel, self._name, method, further)(*arguments)
