"""Five hundred deploys and rollbacks under load, with kill -9 of the site and of the router.

Is every request answered by one version with that version's bindings? `make bench-deploys` runs it: python -m load_tests.scenarios.deploys [--deploys
N] [--kills N].

A router and one site run as processes. New versions of one function are deployed, every tenth change is a rollback, and clients use requests,
streams, background work, WebSockets, a queue, Durable Objects, workflows and a cron trigger. Each version writes its number and the number in its
bindings into all results. Errors are: two numbers that differ, a version without traffic at that time, a cut, a lost write, a message that was
handled again after its acknowledgement, a workflow step that ran twice. WebSockets are closed with 1012 when their version is replaced, as
documented, and reconnect. A busy object stays in its replaced version until it is idle, so its version may differ from its caller's.

A kill may cut requests that are open between the kill and the network's recovery: such cuts are counted by kind and are not errors. Acknowledged work
must never be lost.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from load_tests.local_network import LocalNetwork
from load_tests.records import write_record
from load_tests.scenarios.ledger import pid_of, wait_until_well
from pilotlight.wire.hop.bundles import digest_of, pack
from pilotlight.wire.hop.deployments import PATH
from pilotlight.wire.hop.headers import DEPLOY_TOKEN_ENV, HOP_SECRET_ENV

NAME = "daily"
LATER_S = 60.0
RECOVERY_S = 90.0  # limit until a change that a kill interrupted is served
BACKGROUND_S = 1.0
LATE_S = 10.0  # the longest delay of due work on a busy machine: a kill of the site in this time may cut it
TOKEN = "a-token-of-sixteen-bytes-or-more"
SITE = '\n[functions]\ndeployments = "ROUTER"\nmax_isolates = 2\n'
ENVIRONMENT = {DEPLOY_TOKEN_ENV: TOKEN, HOP_SECRET_ENV: "a secret of sixteen bytes or more"}
MANIFEST = f"""
name = "{NAME}"
main = "entry.py"
[vars]
NUMBER = 0
[[kv_namespaces]]
binding = "KV"
[[durable_objects.bindings]]
name = "OBJECTS"
class_name = "Tally"
[[migrations]]
tag = "v1"
new_sqlite_classes = ["Tally"]
[[queues.producers]]
binding = "QUEUE"
queue = "{NAME}"
[[queues.consumers]]
queue = "{NAME}"
max_batch_timeout = 0
[[workflows]]
name = "{NAME}-steps"
binding = "STEPS"
class_name = "Steps"
[triggers]
crons = ["* * * * *"]
"""
ENTRY = """
import asyncio, json, time
from urllib.parse import parse_qsl, urlsplit
from workers import DurableObject, Response, WebSocketPair, WorkerEntrypoint, WorkflowEntrypoint, env

VERSION = 0

def bound():
    return int(env.NUMBER)

async def append(key, *entry):
    kept = json.loads(await env.KV.get(key) or "[]")
    await env.KV.put(key, json.dumps([*kept, entry]))

class Tally(DurableObject):
    async def work(self):
        first = VERSION
        await asyncio.sleep(0.2)
        count = (self.ctx.storage.kv.get("n") or 0) + 1
        self.ctx.storage.kv.put("n", count)
        return [first, bound(), count]

    async def count(self):
        return self.ctx.storage.kv.get("n") or 0

class Steps(WorkflowEntrypoint):
    async def run(self, event, step):
        id = event.payload["id"]

        @step.do("first")
        async def first():
            began_s = time.time()
            await append("workflow first " + id, VERSION, bound(), began_s, time.time())
            return VERSION

        @step.do("second")
        async def second():
            began_s = time.time()
            await append("workflow second " + id, VERSION, bound(), began_s, time.time())
            return VERSION

        done = [await first()]
        await step.sleep("rest", "1 second")
        return [*done, await second()]

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        parts = urlsplit(request.url)
        query, path = dict(parse_qsl(parts.query)), parts.path.rpartition("/")[2]
        id = query.get("id", "")
        if path == "version":
            return Response.json([VERSION, bound()])
        if path == "request":
            await env.KV.put("request " + id, str(bound()))
            await asyncio.sleep(0.4)
            return Response.json([VERSION, int(await env.KV.get("request " + id))])
        if path == "stream":
            async def pieces():
                yield f"{VERSION}\\n"
                for number in range(8):
                    await asyncio.sleep(0.25)
                    await env.KV.put("stream " + id, str(bound()))
                    yield f"{await env.KV.get('stream ' + id)}\\n"
                yield "end\\n"
            return Response(pieces())
        if path == "background":
            async def work():
                await asyncio.sleep(BACKGROUND_S)
                await env.KV.put("background " + id, str(bound()))
            self.ctx.waitUntil(work())
            return Response.json([VERSION, bound()])
        if path == "object":
            first, called = VERSION, await env.OBJECTS.getByName(query["name"]).work()
            return Response.json([first, bound(), *called])
        if path == "count":
            return Response.json(await env.OBJECTS.getByName(query["name"]).count())
        if path == "send":
            await env.QUEUE.send(id)
            return Response.json([VERSION, bound()])
        if path == "workflow":
            await env.STEPS.create(id=id, params={"id": id})
            return Response.json([VERSION, bound()])
        if path == "status":
            status = await (await env.STEPS.get(id)).status()
            return Response.json([status.status, status.output])
        if path == "kept":
            return Response.json(await asyncio.gather(*(env.KV.get(key) for key in query["keys"].split(","))))
        if path == "socket":
            client, server = WebSocketPair.new().object_values()
            server.accept()
            async def echo():
                async for message in server:
                    await server.send(json.dumps([message, VERSION, bound()]))
            self.ctx.waitUntil(echo())
            return Response(None, status=101, web_socket=client)
        return Response("healthy")

    async def queue(self, batch):
        first, began_s = VERSION, time.time()
        await asyncio.sleep(0.3)
        for message in batch.messages:
            await append("queue " + message.body, first, bound(), began_s, time.time())
            message.ack()
        if len(batch.messages) % 2:
            raise ValueError("after its messages were acknowledged")

    async def scheduled(self, controller):
        first, began_s = VERSION, time.time()
        await asyncio.sleep(0.3)
        await append(f"cron {int(controller.scheduledTime) // 60000}", first, bound(), began_s, time.time())
"""


class Cut(Exception):
    """Raised if an answer is missing or incomplete: an error unless a process was killed meanwhile."""


@dataclass
class Window:
    """The interval from a kill until the network has recovered."""

    target: str
    from_s: float  # on the monotonic clock
    from_wall_s: float
    until_s: float = float("inf")
    until_wall_s: float = float("inf")


class Kills:
    """Kills processes, one after another, and records the intervals until the network has recovered."""

    def __init__(self, network: LocalNetwork | None, rng: random.Random) -> None:
        self._network = network
        self._rng = rng
        self.windows: list[Window] = []
        self.is_well = asyncio.Event()
        self.is_well.set()

    async def kill(self, target: str) -> None:
        """Kill the site or the router at a random moment within a tenth of a second.

        Returns when all are healthy again.
        """
        assert self._network is not None
        pid = await asyncio.to_thread(pid_of, self._network, target, self._rng)
        await asyncio.sleep(self._rng.uniform(0.0, 0.1))
        window = Window(target, time.monotonic(), time.time())
        self.windows.append(window)
        self.is_well.clear()
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until_well, self._network, pid)
        window.until_s, window.until_wall_s = time.monotonic(), time.time()
        self.is_well.set()

    @property
    def longest_s(self) -> float:
        """Return the longest recovery from a kill."""
        return round(max((each.until_s - each.from_s for each in self.windows), default=0.0), 1)

    def between(self, from_s: float, until_s: float) -> Window | None:
        """Return a kill whose window overlaps this interval of the monotonic clock; None if there is none."""
        return next((each for each in self.windows if each.from_s <= until_s and from_s <= each.until_s), None)

    def of_site_at(self, from_wall_s: float, until_wall_s: float) -> bool:
        """Tell whether a kill of the site overlaps this interval of the wall clock."""
        windows = (each for each in self.windows if each.target == "site")
        return any(each.from_wall_s <= until_wall_s and from_wall_s <= each.until_wall_s for each in windows)


class Rollout:
    """The versions of the function, and the times at which each may have had the traffic."""

    def __init__(self, session: aiohttp.ClientSession, folder: Path, kills: Kills) -> None:
        self._session = session
        self._folder = folder
        self._kills = kills
        self._began: list[tuple[int, float]] = []  # each version with the time at which the change to it was requested
        self._done_s: list[float] = []
        self._revision = 0
        self.num_interrupted = 0  # changes interrupted by a kill
        self.num_refused = 0  # changes refused because the only site was not healthy, without a kill

    async def deploy(self, version: int) -> None:
        self._folder.mkdir(exist_ok=True)
        code = ENTRY.replace("VERSION = 0", f"VERSION = {version}").replace("BACKGROUND_S", str(BACKGROUND_S))
        (self._folder / "entry.py").write_text(code)
        (self._folder / "wrangler.toml").write_text(MANIFEST.replace("NUMBER = 0", f"NUMBER = {version}"))
        data = pack(self._folder)
        digest = digest_of(data)
        await self._change(version, f"{PATH}/{NAME}", {"digest": digest, "keeps_data": True}, (digest, data))

    async def roll_back(self) -> None:
        """Route the traffic to the previous version without a new deploy."""
        await self._change(self._began[-1 if len(self._began) < 2 else -2][0], f"{PATH}/{NAME}/rollback", {})

    def may_have_taken(self, version: int, asked_s: float, answered_s: float) -> bool:
        """Tell whether a version may have received traffic at any time between a request and its answer."""
        for place, (each, began_s) in enumerate(self._began):
            replaced_s = self._done_s[place + 1] if place + 1 < len(self._done_s) else float("inf")
            if each == version and began_s <= answered_s and asked_s <= replaced_s:
                return True
        return False

    async def _change(
        self, version: int, path: str, wanted: dict[str, Any], bundle: tuple[str, bytes] | None = None
    ) -> None:
        """Make a change. After an error, read the state, and retry unless the change was made."""
        began_s = time.monotonic()
        self._began.append((version, began_s))
        is_interrupted = False
        while True:
            try:
                if bundle is not None:
                    await self._send("PUT", f"{PATH}/bundles/{bundle[0]}", bundle[1])
                body = json.dumps({**wanted, "expected_revision": self._revision}).encode()
                changed = json.loads(await self._send("POST", path, body))
                is_confirmed = not changed["unconfirmed"]
                break
            except (aiohttp.ClientError, TimeoutError, Cut) as error:
                is_killed = self._kills.between(began_s, time.monotonic()) is not None
                is_away = "no_site_available" in str(error) and time.monotonic() < began_s + RECOVERY_S
                if not is_killed and not is_away:  # on a busy machine the site may miss health probes
                    raise RuntimeError(f"{path}: {type(error).__name__}: {error}") from None
                is_interrupted = is_killed
                self.num_refused += not is_killed
                await self._kills.is_well.wait()
                await asyncio.sleep(0.2)
                changed, is_confirmed = json.loads(await self._send("GET", f"{PATH}/{NAME}")), False
                if changed["revision"] > self._revision:
                    break
        self._revision = changed["revision"]
        if not is_confirmed:
            is_interrupted = self._kills.between(began_s, time.monotonic()) is not None
            if not is_interrupted and not self.num_refused:
                raise RuntimeError(f"not served in time: {changed['unconfirmed']}")
            await self._until_served(version)
        self.num_interrupted += is_interrupted
        self._done_s.append(time.monotonic())

    async def _until_served(self, version: int) -> None:
        until_s = time.monotonic() + RECOVERY_S
        served: Any = None
        while time.monotonic() < until_s:
            with suppress(aiohttp.ClientError, TimeoutError, Cut):
                served = json.loads(await self._send("GET", f"/fn/{NAME}/version"))
                if served == [version, version]:
                    return
            await asyncio.sleep(0.05)
        raise RuntimeError(f"version {version} is not served {RECOVERY_S:g} s after a kill, but {served}")

    async def _send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with self._session.request(method, path, data=body, headers=headers) as answer:
            data = await answer.read()
            if answer.status >= 300:
                raise Cut(f"{answer.status} {data.decode(errors='replace')[:500]}")
            return data


class Clients:
    """Clients that keep the function busy.

    `errors` are messages; `cuts` counts requests cut by kills, by kind.
    """

    def __init__(self, session: aiohttp.ClientSession, rollout: Rollout, kills: Kills) -> None:
        self._session = session
        self._rollout = rollout
        self._kills = kills
        self._number = 0
        self.is_over = False
        self._until_s = 0.0  # work that has not ended by this time counts as lost
        self.counts: Counter[str] = Counter()
        self.cuts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._kept: dict[str, int] = {}  # acknowledged keys with the version that wrote each
        self._background: dict[str, tuple[int, float]] = {}  # version, and wall-clock time of the answer
        self._asked_objects: Counter[str] = Counter()
        self._objects: Counter[str] = Counter()
        self._sent: list[str] = []
        self._workflows: list[str] = []
        self._began_wall_s = time.time()

    async def keep_asking(self, work: Callable[[str], Awaitable[None]]) -> None:
        while not self.is_over:
            self._number += 1
            kind, asked_s, number = work.__name__, time.monotonic(), self._number
            try:
                await work(str(number))
                self.counts[kind] += 1
            except (aiohttp.ClientError, TimeoutError, Cut) as error:
                window = self._kills.between(asked_s, time.monotonic())
                if window is None:
                    self.errors.append(f"{kind} {number}: {type(error).__name__}: {error}")
                else:
                    self.cuts[f"{kind}, by a kill of the {window.target}"] += 1
                    await asyncio.sleep(0.1)
            except Exception as error:
                self.errors.append(f"{kind} {number}: {type(error).__name__}: {error}")

    async def request(self, id: str) -> None:
        self._kept[f"request {id}"] = await self._version_of("request", id=id)

    async def background(self, id: str) -> None:
        version = await self._version_of("background", id=id)
        self._background[id] = version, time.time()
        await asyncio.sleep(0.1)

    async def send(self, id: str) -> None:
        await self._version_of("send", id=id)
        self._sent.append(id)
        await asyncio.sleep(0.1)

    async def workflow(self, id: str) -> None:
        await self._version_of("workflow", id=f"w{id}")
        self._workflows.append(f"w{id}")
        await asyncio.sleep(0.5)

    async def object(self, id: str) -> None:
        name = str(int(id) % 5)
        self._asked_objects[name] += 1
        _, _, first, last, _ = await self._answer("object", name=name)
        self._objects[name] += 1
        if first != last:
            raise ValueError(f"a call of an object began in version {first} and had the bindings of {last}")

    async def stream(self, id: str) -> None:
        asked_s = time.monotonic()
        async with self._session.get(f"/fn/{NAME}/stream", params={"id": id}) as answer:
            text = (await answer.read()).decode()
            lines = _checked(answer.status, text).split()
        if len(lines) != 10 or lines[-1] != "end" or len(set(lines[:-1])) != 1:
            raise ValueError(f"{answer.status} {lines}")
        self._check(int(lines[0]), asked_s)
        self._kept[f"stream {id}"] = int(lines[0])

    async def socket(self, id: str) -> None:
        asked_s, versions, number = time.monotonic(), set[int](), 0
        async with self._session.ws_connect(f"/fn/{NAME}/socket") as socket:
            while not self.is_over and number < 40:
                await socket.send_str(str(number))
                message = await socket.receive(30)
                if message.type is not aiohttp.WSMsgType.TEXT:
                    if socket.close_code != 1012:
                        raise Cut(f"closed with {socket.close_code}")
                    break
                echoed, *numbers = json.loads(message.data)
                if echoed != str(number):
                    raise ValueError(f"{echoed} in place of {number}")
                versions.update(numbers)
                number += 1
                await asyncio.sleep(0.1)
        if len(versions) > 1:
            raise ValueError(f"versions {versions} in one socket")
        for version in versions:
            self._check(version, asked_s)

    async def check_later(self) -> None:
        """Check all acknowledged work.

        That is writes, background work, messages, objects, workflows, and the minutes of the cron trigger.
        """
        until_wall_s = time.time()
        self._until_s = time.monotonic() + LATER_S
        for key, kept in (await self._found(list(self._kept), waits=False)).items():
            if kept != str(self._kept[key]):
                self.errors.append(f"{key} was acknowledged by version {self._kept[key]} and has kept {kept!r}")
        await self._check_background()
        for key, kept in (await self._found([f"queue {id}" for id in self._sent])).items():
            self._check_runs(key, kept)
        for name, count in self._objects.items():
            kept = await self._get("count", name=name)
            if not count <= kept <= self._asked_objects[name]:
                asked = f"acknowledged {count} and asked {self._asked_objects[name]} times"
                self.errors.append(f"the object {name} was {asked} and has kept {kept}")
        await self._check_workflows()
        await self._check_minutes(until_wall_s)

    async def _check_background(self) -> None:
        found = await self._found([f"background {id}" for id in self._background])
        for id, (version, answered_s) in self._background.items():
            if (kept := found[f"background {id}"]) == str(version):
                continue
            if kept is None and self._kills.of_site_at(answered_s - 1.0, answered_s + BACKGROUND_S + LATE_S):
                self.cuts["background work, by a kill of the site"] += 1
            else:
                self.errors.append(f"background work {id} of version {version} has kept {kept!r}")

    async def _check_workflows(self) -> None:
        for id in self._workflows:
            while (status := await self._get("status", id=id))[0] not in ("complete", "errored", "terminated"):
                if time.monotonic() > self._until_s:
                    break
                await asyncio.sleep(0.1)
            if status[0] != "complete":
                self.errors.append(f"the workflow {id} has ended with {status}")
        steps = [f"workflow {step} {id}" for id in self._workflows for step in ("first", "second")]
        for key, kept in (await self._found(steps)).items():
            self._check_runs(key, kept)

    async def _check_minutes(self, until_wall_s: float) -> None:
        """Check that the cron trigger fired once in each whole minute of the run, in one version."""
        minutes = range(int(self._began_wall_s // 60) + 1, int(until_wall_s // 60) + (until_wall_s % 60 > LATE_S))
        for minute in minutes:
            (kept,) = (await self._found([f"cron {minute}"])).values()
            if kept is None and self._kills.of_site_at(60.0 * minute, 60.0 * minute + LATE_S):
                self.cuts["cron, by a kill of the site"] += 1
                continue
            runs = json.loads(kept or "[]")
            if len(runs) != 1 or runs[0][0] != runs[0][1]:
                self.errors.append(f"the minute {minute} has been run by {runs}")
        self.counts["cron"] = len(minutes)

    def _check_runs(self, key: str, kept: str | None) -> None:
        """Check that work ran once, or again if the site was killed before the outcome was on disk."""
        runs = json.loads(kept or "[]")
        again = [run for run, following in itertools.pairwise(runs) if not self._kills.of_site_at(run[2], following[2])]
        if not runs or again or any(run[0] != run[1] for run in runs):
            self.errors.append(f"{key} was handled by {runs} (version, that of its bindings, beginning and end)")
        elif len(runs) > 1:
            self.cuts[f"{key.split()[0]} handled again, after a kill of the site"] += 1

    async def _version_of(self, path: str, **params: str) -> int:
        return int((await self._answer(path, **params))[0])

    async def _answer(self, path: str, **params: str) -> list[Any]:
        """Send a request; check the version and the number of its bindings, with which the answer begins."""
        asked_s = time.monotonic()
        answered: list[Any] = await self._get(path, **params)
        first, last, *_ = answered
        if first != last:
            raise ValueError(f"started by version {first}, with the bindings of {last}")
        self._check(first, asked_s)
        return answered

    async def _get(self, path: str, **params: str) -> Any:
        async with self._session.get(f"/fn/{NAME}/{path}", params=params) as answer:
            return json.loads(_checked(answer.status, await answer.text()))

    def _check(self, version: int, asked_s: float) -> None:
        if not self._rollout.may_have_taken(version, asked_s, time.monotonic()):
            raise ValueError(f"answered by version {version}, which had no traffic then")

    async def _found(self, keys: list[str], *, waits: bool = True) -> dict[str, str | None]:
        """Return the stored values of keys. `waits`: poll for missing ones, which may still be written."""
        found: dict[str, str | None] = {}
        missing = keys
        while missing:
            for start in range(0, len(missing), 50):
                some = missing[start : start + 50]
                found.update(zip(some, await self._get("kept", keys=",".join(some)), strict=True))
            missing = [key for key in keys if found[key] is None]
            if not waits or time.monotonic() > self._until_s:
                break
            await asyncio.sleep(0.05)
        return found


def _checked(status: int, text: str) -> str:
    """Return an answer's text.

    Raises Cut if the site or the router was down, ValueError for any other error.
    """
    if status in (502, 503, 504):
        raise Cut(f"{status} {text[:200]}")
    if status != 200:
        raise ValueError(f"{status} {text[:200]}")
    return text


async def deploy_under_load(
    url: str,
    folder: Path,
    num_deploys: int,
    within_s: float,
    each: int = 2,
    network: LocalNetwork | None = None,
    num_kills: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Make the changes with `each` clients of every kind, and kill processes of the network during some.

    The pauses between changes last at most `within_s` seconds in all. Return counts and errors.
    """
    timeout = aiohttp.ClientTimeout(total=120)
    rng = random.Random(seed)
    killed_at = sorted(rng.sample(range(2, num_deploys + 1), num_kills))
    async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        kills = Kills(network, rng)
        rollout = Rollout(session, folder, kills)
        await rollout.deploy(1)
        clients = Clients(session, rollout, kills)
        kinds = (
            clients.request, clients.stream, clients.background, clients.send, clients.object, clients.socket, clients.workflow,
        )  # fmt: skip
        tasks = [asyncio.create_task(clients.keep_asking(kind)) for kind in kinds for _ in range(each)]
        started_s, slowest_s = time.monotonic(), 0.0
        for number in range(2, num_deploys + 1):
            due_s = started_s + within_s * (number - 1) / num_deploys
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            began_s = time.monotonic()
            killing = None
            if number in killed_at:
                killing = asyncio.create_task(kills.kill(("site", "router")[killed_at.index(number) % 2]))
            await (rollout.roll_back() if number % 10 == 0 else rollout.deploy(number))
            if killing is None:
                slowest_s = max(slowest_s, time.monotonic() - began_s)
            else:
                await killing
            if number % 10 == 0:
                told = f"{number} changes, {sum(clients.counts.values())} answers, {sum(clients.cuts.values())} cuts"
                print(f"{told}, {len(clients.errors)} errors", file=sys.stderr)
        clients.is_over = True
        await asyncio.gather(*tasks)
        took_s = time.monotonic() - started_s
        await clients.check_later()
    return {
        "changes": num_deploys, "kills": num_kills, "longest outage s": kills.longest_s, "changes that a kill interrupted": rollout.num_interrupted,
        "changes refused, the site being busy": rollout.num_refused,
        "seconds": round(took_s, 1), "slowest change s": round(slowest_s, 2),
        "answers": dict(clients.counts), "cut by kills": dict(clients.cuts), "errors": clients.errors,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deploys", type=int, default=500)
    parser.add_argument("--kills", type=int, default=20, help="number of kills, of the site and the router in turns")
    parser.add_argument("--seed", type=int, default=0, help="seed of the times of the kills")
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds over which the changes are spread")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="pilotlight-") as folder,
        LocalNetwork(environment=ENVIRONMENT, num_sites=1, site_settings=SITE) as network,
    ):
        result = asyncio.run(
            deploy_under_load(
                network.url,
                Path(folder) / NAME,
                options.deploys,
                options.seconds,
                network=network,
                num_kills=options.kills,
                seed=options.seed,
            )
        )
        if result["errors"]:
            (site,) = network.site_urls
            print(network.log(site), file=sys.stderr)
    print(json.dumps({**result, "errors": len(result["errors"])}))
    for error in result["errors"][:50]:
        print(error)
    if not options.no_record:
        print(f"Record: {write_record('deploys', {**result, 'errors': result['errors'][:20]})}")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
