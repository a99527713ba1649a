"""Workflows: `run(event, step)`, whose finished steps are not run again, even if the process crashes.

Each instance is a Durable Object: its storage has the results of steps, and its alarm wakes it. When it wakes, `run` starts again, and finished steps
return their stored results. During long waits nothing of it is in memory.
"""

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from pilotlight.functions.channel.failure import Failure
from workers.entrypoint import Context, DurableObject, WorkflowEntrypoint
from workers.face import Record
from workers.trouble import text_of
from workers.values import pack, unpack
from workers.workflow.workflow_steps import NonRetryableError, StepLog, WorkflowStep

__all__ = ["NonRetryableError", "WorkflowEntrypoint"]

PREFIX = "$workflow$"  # prefix of the class names of instances; manifest.py has it, too
MAX_DEATHS = 5  # crashes of the process during a run, after which the instance fails
OVER = ("complete", "errored", "terminated")


class WorkflowObject(DurableObject):
    """One instance of a workflow."""

    workflow: type[WorkflowEntrypoint]

    def __init__(self, ctx: Any, env: Any) -> None:
        super().__init__(ctx, env)
        self._log = StepLog(ctx.storage)
        self._running: asyncio.Task[Any] | None = None
        self._step: WorkflowStep | None = None

    # -- called by the binding -------------------------------------------------------------------------------------------------------

    async def create(self, workflow: str, id: str, params: Any) -> None:
        if self._state is not None:
            raise Failure(
                f"(instance.already_exists) {workflow} has an instance {id!r}", code="already_exists", status=409
            )
        now_ms = int(time.time() * 1000)
        state = {"workflow": workflow, "id": id, "params": pack(params, "params"), "created_ms": now_ms}
        self._keep({**state, "status": "queued", "output": None, "error": None})
        await self._wake()

    async def exists(self) -> bool:
        return self._state is not None

    async def status(self) -> dict[str, Any]:
        state = self._known()
        return {"status": state["status"], "error": state["error"], "output": unpack(state["output"])}

    async def send_event(self, type: str, payload: Any) -> None:
        self._ask_open("take an event")
        self._log.add_event(type, pack(payload, "payload"))
        if self._step is not None:
            self._step.on_event()
        if self._known()["status"] != "paused":
            await self._wake()

    async def pause(self) -> None:
        self._ask_open("be paused")
        await self._halt("paused")

    async def resume(self) -> None:
        if self._known()["status"] != "paused":
            raise Failure("(instance.not_paused) only an instance that is paused can be resumed", code="not_paused")
        self._update(status="queued")
        await self._wake()

    async def terminate(self) -> None:
        self._ask_open("be terminated")
        await self._halt("terminated")

    async def restart(self) -> None:
        self._known()
        await self._halt("queued")
        self._log.clear()
        self._update(output=None, error=None)
        await self._wake()

    # -- running ---------------------------------------------------------------------------------------------------------------------

    async def alarm(self, info: Any = None) -> None:
        """Run the workflow, with stored results for finished steps, until it ends or waits for long."""
        state = self._state
        if state is None or state["status"] in (*OVER, "paused") or self._running is not None:
            return
        deaths = getattr(info, "retryCount", 0) or 0
        if deaths >= MAX_DEATHS:
            return self._update(
                status="errored", error={"name": "Error", "message": f"its process ended {deaths} times"}
            )
        self._update(status="running")
        self._running = asyncio.ensure_future(self._run(state))
        try:
            await asyncio.wait({self._running})
            if not self._running.cancelled():
                self._running.result()
        finally:
            self._running = self._step = None

    async def _run(self, state: dict[str, Any]) -> None:
        step = self._step = WorkflowStep(self._log)
        work = asyncio.ensure_future(self._result(state, step))
        parked = asyncio.ensure_future(step.parked())
        try:
            await asyncio.wait({work, parked}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return self._end(work)
            self._update(status="waiting")
            until_s = time.time() if step.has_news else parked.result()
            if until_s is not None:
                await self.ctx.storage.setAlarm(int(until_s * 1000))
        finally:
            for task in (work, parked):
                task.cancel()
            await asyncio.gather(work, parked, return_exceptions=True)

    async def _result(self, state: dict[str, Any], step: WorkflowStep) -> Any:
        created = datetime.fromtimestamp(state["created_ms"] / 1000, UTC)
        event = Record(
            payload=unpack(state["params"]),
            timestamp=created,
            instanceId=state["id"],
            workflowName=state["workflow"],
        )
        result = self.workflow(Context(), self.env).run(event, step)  # type: ignore[attr-defined]  # the author defines it
        return pack(await result if hasattr(result, "__await__") else result, "what run returned")

    def _end(self, work: "asyncio.Task[Any]") -> None:
        if work.cancelled():
            return
        if (error := work.exception()) is not None:
            print(text_of(error), flush=True)
            return self._update(status="errored", error={"name": type(error).__name__, "message": str(error)})
        self._update(status="complete", output=work.result())

    async def _halt(self, status: str) -> None:
        """Stop a run in progress. An interrupted step runs again if the workflow continues."""
        self._update(status=status)
        await self.ctx.storage.deleteAlarm()
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
        self._update(status=status)

    async def _wake(self) -> None:
        await self.ctx.storage.setAlarm(int(time.time() * 1000))

    # -- its state ----------------------------------------------------------------------------------------------------------------------

    @property
    def _state(self) -> dict[str, Any] | None:
        state: dict[str, Any] | None = self.ctx.storage.kv.get("instance")
        return state

    def _known(self) -> dict[str, Any]:
        state = self._state
        if state is None:
            raise Failure("(instance.not_found) this workflow has no such instance", code="not_found", status=404)
        return state

    def _ask_open(self, what: str) -> None:
        if (status := self._known()["status"]) in OVER:
            raise Failure(f"(instance.cannot_change) the instance is {status} and cannot {what}", code="over")

    def _update(self, **changes: Any) -> None:
        self._keep({**self._known(), **changes})

    def _keep(self, state: dict[str, Any]) -> None:
        self.ctx.storage.kv.put("instance", state)


def object_class(module: Any, name: str) -> type[DurableObject] | None:
    """Return the class of a workflow's instances; None if the module has no such workflow."""
    kind = getattr(module, name.removeprefix(PREFIX), None)
    if not (isinstance(kind, type) and issubclass(kind, WorkflowEntrypoint)):
        return None
    if name not in _classes or _classes[name].workflow is not kind:
        _classes[name] = type(name, (WorkflowObject,), {"workflow": kind})
    return _classes[name]


_classes: dict[str, type[WorkflowObject]] = {}
