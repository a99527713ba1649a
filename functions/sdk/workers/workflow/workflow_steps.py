"""The steps of a workflow: run, retry and remember steps; sleep; wait for events.

A step is identified by its name and the number of earlier steps with that name. See https://developers.cloudflare.com/workflows/python and
/build/sleeping-and-retrying. workflows.py wakes the workflow.
"""

import asyncio
import inspect
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pilotlight.functions.channel.failure import Failure
from workers.face import Record, snake_case
from workers.javascript import Date
from workers.trouble import remote_error
from workers.values import pack, unpack

UNITS = {
    "second": 1.0,
    "minute": 60.0,
    "hour": 3600.0,
    "day": 86_400.0,
    "week": 604_800.0,
    "month": 2_592_000.0,
    "year": 31_536_000.0,
}
STAYS_S = 5.0  # the workflow stays in memory during shorter waits
QUIET_S = 0.05  # idle time after which the workflow is suspended
TURN_S = 60.0  # after this time a run starts no step, because the request that it is part of has a time limit
FOREVER = float("inf")
UNKEPT = object()


class NonRetryableError(Exception):
    """Raised by a step to prevent retries."""


class WorkflowTimeoutError(Exception):
    """A step took too long, or an event did not arrive in time."""


class RetryPolicy(NamedTuple):
    limit: float = 5  # may be infinite
    delay_s: float = 10.0
    backoff: str = "exponential"
    timeout_s: float = 600.0

    @classmethod
    def of(cls, config: Any) -> "RetryPolicy":
        given = {snake_case(name): value for name, value in dict(config or {}).items()}
        retries = dict(given.get("retries") or {})
        backoff = retries.get("backoff", cls._field_defaults["backoff"])
        if backoff not in ("constant", "linear", "exponential"):
            raise ValueError(f"backoff is constant, linear or exponential, and not {backoff!r}")
        return cls(
            _limit(retries.get("limit", 5)),
            seconds_of(retries.get("delay", 10_000)),
            backoff,
            seconds_of(given.get("timeout", 600_000)),
        )

    def pause_s(self, attempt: int) -> float:
        """Return the pause in seconds after a failed attempt; attempts count from 1."""
        factor: float = {"constant": 1, "linear": attempt, "exponential": 2.0 ** (attempt - 1)}[self.backoff]
        return self.delay_s * factor

    def as_config(self) -> Record:
        retries = Record(limit=self.limit, delay=int(self.delay_s * 1000), backoff=self.backoff)
        return Record(retries=retries, timeout=int(self.timeout_s * 1000))


class StepLog:
    """The results of steps, and events not yet used, in a Durable Object's storage."""

    def __init__(self, storage: Any) -> None:
        self._storage = storage

    def get(self, kind: str, key: str) -> Any:
        return self._storage.kv.get(f"{kind}:{key}")

    async def put(self, kind: str, key: str, value: Any) -> None:
        """Store a value; return once it is on disk."""
        self._storage.kv.put(f"{kind}:{key}", value)
        await self._storage.sync()

    def add_event(self, type: str, payload: Any) -> None:
        number = int(self._storage.kv.get("events") or 0) + 1
        self._storage.kv.put("events", number)
        event = {"type": type, "payload": payload, "timestamp_ms": int(time.time() * 1000)}
        self._storage.kv.put(f"event:{number:09}", event)

    async def take_event(self, type: str, key: str, until_s: float) -> Any:
        """Take the oldest event that came by `until_s`, and store it for the step.

        Return it, or None if there is none.
        """
        for name, event in self._storage.kv.list(prefix="event:"):
            if event["type"] == type and event["timestamp_ms"] <= until_s * 1000:
                self._storage.kv.delete(name)
                await self.put("step", key, {"value": event})
                return event
        return None

    def clear(self) -> None:
        for name, _ in self._storage.kv.list():
            if name != "instance":
                self._storage.kv.delete(name)


class WorkflowStep:
    """The `step` argument of `run`, for one run."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._counts: Counter[str] = Counter()
        self._steps: dict[str, Any] = {}  # decorated steps, by both the function's name and the step's name
        self._at_work = 0  # number of steps that are running
        self._waits: dict[object, float] = {}  # Unix time in seconds at which each wait ends
        self._changed = asyncio.Event()
        self._began_s = time.monotonic()
        self._is_tired = False  # set after a long run: no further step starts

    # -- called by the workflow ------------------------------------------------------------------------------------------------------

    def do(self, name: Any = None, depends: Any = None, concurrent: bool = False, config: Any = None) -> Any:
        """Decorate a step, which runs when the decorated function is called and awaited.
        Its parameters are the results of the steps in `depends`, or of the steps with the parameters' names; `ctx` is its context."""
        if callable(depends):  # called as in JavaScript: do(name, callback)
            return self._once(str(name), depends, (), RetryPolicy.of(config))

        def decorate(function: Callable[..., Any]) -> Callable[[], Any]:
            title = str(name) if name is not None else function.__name__
            step = _Step(self, title, function, depends, concurrent, RetryPolicy.of(config))
            self._steps[function.__name__] = self._steps[title] = step
            return step

        return decorate(name) if callable(name) else decorate

    async def sleep(self, name: str, duration: Any) -> None:
        """Wait for a number of milliseconds, or for a duration such as "2 hours"."""
        await self._sleep_until(name, time.time() + seconds_of(duration))

    async def sleep_until(self, name: str, timestamp: Any) -> None:
        """Wait until a datetime or its ISO 8601 text, a Date, or a Unix time in ms."""
        if isinstance(timestamp, str):
            timestamp = datetime.fromisoformat(timestamp)
        is_time = isinstance(timestamp, datetime)
        until_s = (
            timestamp.timestamp() if is_time else (int(timestamp) if isinstance(timestamp, Date) else timestamp) / 1000
        )
        await self._sleep_until(name, until_s)

    async def wait_for_event(self, name: str, event_type: Any, /, timeout: Any = "24 hours") -> Record:
        """Wait for an event of this type that `send_event` sends; return {type, payload, timestamp}.
        Raises WorkflowTimeoutError."""
        if isinstance(event_type, dict):  # called as in JavaScript, with {type, timeout}
            event_type, timeout = event_type["type"], event_type.get("timeout", timeout)
        key = self._key(name)
        done = self._log.get("step", key) or {}
        if (error := done.get("error")) is not None:
            raise restored(error)
        found = done.get("value")
        ends_s = await self._deadline(key, time.time() + seconds_of(timeout))
        while found is None and (found := await self._log.take_event(event_type, key, ends_s)) is None:
            if time.time() >= ends_s:
                late = WorkflowTimeoutError(f"no event {event_type!r} has come for the step {name!r} in time")
                await self._log.put("step", key, {"error": recorded(late)})
                raise late
            await self._wait(ends_s, is_event=True)
        stamp = datetime.fromtimestamp(found["timestamp_ms"] / 1000, UTC)
        return Record(type=found["type"], payload=unpack(found["payload"]), timestamp=stamp)

    sleepUntil, waitForEvent = sleep_until, wait_for_event

    # -- called by the instance ------------------------------------------------------------------------------------------------------

    def on_event(self) -> None:
        self._changed.set()

    @property
    def has_news(self) -> bool:
        """Tell whether something has changed since `parked` last waited."""
        return self._changed.is_set()

    async def parked(self) -> float | None:
        """Wait until no step runs and all waits are long.
        Return the Unix time in seconds at which to run again: now after a long run, else at the end of the first wait. None if no wait ends."""
        while True:
            self._changed.clear()
            if self._is_tired and not self._at_work:
                return time.time()
            until_s = min(self._waits.values(), default=0.0)
            if not self._at_work and until_s > time.time() + STAYS_S:
                try:
                    async with asyncio.timeout(QUIET_S):
                        await self._changed.wait()
                except TimeoutError:
                    return None if until_s == FOREVER else until_s
            else:
                await self._changed.wait()

    # -- a step -------------------------------------------------------------------------------------------------------------------------

    async def _once(
        self, name: str, function: Callable[..., Any], results: tuple[Any, ...], policy: RetryPolicy
    ) -> Any:
        key = self._key(name)
        if (done := self._log.get("step", key)) is not None:
            if (error := done.get("error")) is not None:
                raise restored(error)
            return unpack(done["value"])
        attempt = int(self._log.get("attempts", key) or 0)
        while True:
            await self._rest_of_pause(key)
            await self._turn()
            attempt += 1
            await self._log.put("attempts", key, attempt)
            step = Record(name=name, count=int(key.rpartition("#")[2]))
            context = Record(step=step, attempt=attempt, config=policy.as_config())
            try:
                value = await self._attempt(function, results, context, policy)
                plain = pack(value, f"what the step {name!r} returned")
            except Exception as error:
                if isinstance(error, NonRetryableError) or attempt > policy.limit:
                    kept = recorded(error)
                    await self._log.put("step", key, {"error": kept})
                    raise restored(kept) from error  # the same exception that every later run raises
                await self._log.put("pause", key, time.time() + policy.pause_s(attempt))
                continue
            await self._log.put("step", key, {"value": plain})
            return unpack(plain)

    async def _attempt(
        self, function: Callable[..., Any], results: tuple[Any, ...], context: Record, policy: RetryPolicy
    ) -> Any:
        arguments = [context if result is CONTEXT else result for result in results]
        self._at_work += 1
        self._changed.set()
        try:
            async with asyncio.timeout(policy.timeout_s) as deadline:
                value = function(*arguments)
                return await value if inspect.isawaitable(value) else value
        except TimeoutError:
            if deadline.expired():
                raise WorkflowTimeoutError(
                    f"the step {context.step.name!r} took more than {policy.timeout_s:g} s"
                ) from None
            raise
        finally:
            self._at_work -= 1
            self._changed.set()

    async def _turn(self) -> None:
        """Wait forever, instead of starting a step, if this run is long.
        The next run continues, with a new time limit."""
        if self._is_tired or time.monotonic() - self._began_s > TURN_S:
            self._is_tired = True
            self._changed.set()
            await asyncio.get_running_loop().create_future()

    async def _rest_of_pause(self, key: str) -> None:
        until_s = float(self._log.get("pause", key) or 0)
        while time.time() < until_s:
            await self._wait(until_s)

    async def _sleep_until(self, name: str, until_s: float) -> None:
        until_s = await self._deadline(self._key(name), until_s)
        while time.time() < until_s:
            await self._wait(until_s)

    async def _deadline(self, key: str, until_s: float) -> float:
        """Return the stored deadline of a step; when the step first starts, store `until_s`."""
        if (noted := self._log.get("until", key)) is not None:
            return float(noted)
        await self._log.put("until", key, until_s)
        return until_s

    async def _wait(self, until_s: float, *, is_event: bool = False) -> None:
        token = object()
        self._waits[token] = until_s
        self._changed.set()
        try:
            if is_event:
                changed = asyncio.ensure_future(self._news())
                await asyncio.wait({changed}, timeout=max(0.0, until_s - time.time()))
                changed.cancel()
            else:
                await asyncio.sleep(max(0.0, until_s - time.time()))
        finally:
            del self._waits[token]
            self._changed.set()

    async def _news(self) -> None:
        await asyncio.sleep(QUIET_S)
        await self._changed.wait()

    def _key(self, name: str) -> str:
        self._counts[name] += 1
        return f"{name}#{self._counts[name]}"


class _Context:
    """The placeholder for a step's `ctx` among its parameters."""


CONTEXT = _Context()


class _Step:
    """A decorated step; dependent steps share the result of one call."""

    def __init__(
        self,
        steps: WorkflowStep,
        name: str,
        function: Callable[..., Any],
        depends: Any,
        concurrent: bool,
        policy: RetryPolicy,
    ) -> None:
        self._steps = steps
        self._name = name
        self._function = function
        self._depends = depends
        self._is_concurrent = concurrent
        self._policy = policy
        self._shared: asyncio.Task[Any] | None = None

    async def __call__(self) -> Any:
        sources = self._sources()
        if self._is_concurrent:
            results = await asyncio.gather(*map(_given, sources))
        else:
            results = [await _given(source) for source in sources]
        self._shared = asyncio.ensure_future(
            self._steps._once(self._name, self._function, tuple(results), self._policy)
        )
        return await self._shared

    async def result(self) -> Any:
        """Return the result for a dependent step; run the step if it has not run."""
        return await (self() if self._shared is None else asyncio.shield(self._shared))

    def _sources(self) -> list[Any]:
        names = list(inspect.signature(self._function).parameters)
        wanted = [name for name in names if name != "ctx"]
        if self._depends is None:
            if unknown := [name for name in wanted if name not in self._steps._steps]:
                raise TypeError(f"the step {self._name!r} has the parameter {unknown[0]!r}, and no step has that name")
            return [CONTEXT if name == "ctx" else self._steps._steps[name] for name in names]
        if len(self._depends) != len(wanted):
            raise TypeError(
                f"the step {self._name!r} has {len(wanted)} parameters, and depends on {len(self._depends)} steps"
            )
        left = iter(self._depends)
        return [CONTEXT if name == "ctx" else next(left) for name in names]


async def _given(source: Any) -> Any:
    return await source.result() if isinstance(source, _Step) else source


def seconds_of(duration: Any) -> float:
    """Return in seconds a number of milliseconds, or a duration such as "5 minutes"."""
    if isinstance(duration, (int, float)):
        return max(0.0, duration / 1000)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", str(duration))
    if found is None or found[2] not in UNITS:
        raise ValueError(
            f"{duration!r} is not a duration: give milliseconds, or a number and one of {', '.join(UNITS)}"
        )
    return float(found[1]) * UNITS[found[2]]


def _limit(given: Any) -> float:
    limit = float(given)
    return int(limit) if math.isfinite(limit) else limit


def recorded(error: Exception) -> dict[str, Any]:
    """Return a step's exception in its stored form, with arguments and attributes.
    Its class is the nearest base class that a later run can import."""
    kind = next(kind for kind in type(error).__mro__ if _found(kind.__module__, kind.__qualname__) is kind)
    # the args of an OSError lack the file's name
    made_of = error.__reduce__()[1] if isinstance(error, OSError) else error.args
    args = [_plain(each) for each in made_of]
    return {
        "name": type(error).__name__,
        "message": str(error),
        "kind": [kind.__module__, kind.__qualname__],
        "args": [str(error)] if UNKEPT in args else args,
        "attributes": {name: plain for name, each in vars(error).items() if (plain := _plain(each)) is not UNKEPT},
    }


def restored(error: dict[str, Any]) -> Exception:
    """Restore a step's exception from its stored form. It has its original class if that can be imported."""
    module, name = error.get("kind") or ("builtins", error["name"])
    kind, text = _found(module, name), f"{error['name']}: {error['message']}"
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is Exception:
        return Exception(error["message"] if error["name"] == "Exception" else text)
    args = [unpack(each) for each in error.get("args") or [error["message"]]]
    try:
        # An author's constructor may take other parameters than the exception's args.
        found: Exception = kind(*args) if kind.__module__ == "builtins" else kind.__new__(kind, *args)
        vars(found).update({name: unpack(each) for name, each in error.get("attributes", {}).items()})
        str(found)
    except Exception:  # an author's class may raise anything
        return Exception(text)
    return remote_error(found) if isinstance(found, Failure) else found


def _found(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _plain(value: Any) -> Any:
    try:
        return pack(value, "a part of an exception")
    except Exception:  # the value cannot be stored
        return UNKEPT
