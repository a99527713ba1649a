"""A day's deploys in five minutes: is every request answered by the version that accepted it?

`make bench-deploys` runs it: python -m load_tests.scenarios.deploys [--deploys N].

One site and its router, a process each; versions of one function follow each other, every tenth change a rollback, while clients keep requests,
streams, background work, WebSockets, a queue and Durable Objects busy. Each version writes its number into all that it does, at the beginning and at
the end. Errors are: an answer with two different numbers, one of a version that had no traffic then, a cut, a lost write and a message that was
handled twice. WebSockets are closed with 1012 when their version is replaced, as documented, and reconnect; an object that is busy in a replaced
version is called there until it is idle, so an object's version may differ from its caller's.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from load_tests.local_network import LocalNetwork
from load_tests.records import write_record
from pilotlight.wire.hop.bundles import digest_of, pack
from pilotlight.wire.hop.deployments import PATH
from pilotlight.wire.hop.headers import DEPLOY_TOKEN_ENV, HOP_SECRET_ENV

NAME = "daily"
LATER_S = 60.0
TOKEN = "a-token-of-sixteen-bytes-or-more"
SITE = '\n[functions]\ndeployments = "ROUTER"\nmax_isolates = 2\n'
ENVIRONMENT = {DEPLOY_TOKEN_ENV: TOKEN, HOP_SECRET_ENV: "a secret of sixteen bytes or more"}
MANIFEST = f"""
name = "{NAME}"
main = "entry.py"
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
"""
ENTRY = """
import asyncio, json
from urllib.parse import parse_qsl, urlsplit
from workers import DurableObject, Response, WebSocketPair, WorkerEntrypoint, env

VERSION = 0

class Tally(DurableObject):
    async def work(self):
        first = VERSION
        await asyncio.sleep(0.2)
        count = (self.ctx.storage.kv.get("n") or 0) + 1
        self.ctx.storage.kv.put("n", count)
        return [first, VERSION, count]

    async def count(self):
        return self.ctx.storage.kv.get("n") or 0

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        parts = urlsplit(request.url)
        query, path = dict(parse_qsl(parts.query)), parts.path.rpartition("/")[2]
        id = query.get("id", "")
        if path == "request":
            await env.KV.put("request " + id, str(VERSION))
            await asyncio.sleep(0.4)
            return Response.json([VERSION, int(await env.KV.get("request " + id))])
        if path == "stream":
            async def pieces():
                yield f"{VERSION}\\n"
                for number in range(8):
                    await asyncio.sleep(0.25)
                    await env.KV.put("stream " + id, str(VERSION))
                    yield f"{await env.KV.get('stream ' + id)}\\n"
                yield "end\\n"
            return Response(pieces())
        if path == "background":
            async def work():
                await asyncio.sleep(1.0)
                await env.KV.put("background " + id, str(VERSION))
            self.ctx.waitUntil(work())
            return Response.json([VERSION, VERSION])
        if path == "object":
            first, called = VERSION, await env.OBJECTS.getByName(query["name"]).work()
            return Response.json([first, VERSION, *called])
        if path == "count":
            return Response.json(await env.OBJECTS.getByName(query["name"]).count())
        if path == "send":
            await env.QUEUE.send(id)
            return Response.json([VERSION, VERSION])
        if path == "kept":
            return Response.json(await env.KV.get(query["key"]))
        if path == "socket":
            client, server = WebSocketPair.new().object_values()
            server.accept()
            async def echo():
                async for message in server:
                    await server.send(json.dumps([message, VERSION]))
            self.ctx.waitUntil(echo())
            return Response(None, status=101, web_socket=client)
        return Response("healthy")

    async def queue(self, batch):
        first = VERSION
        await asyncio.sleep(0.3)
        for message in batch.messages:
            seen = json.loads(await env.KV.get("queue " + message.body) or "[]")
            await env.KV.put("queue " + message.body, json.dumps([*seen, [first, VERSION, message.attempts]]))
"""


class Rollout:
    """The versions of the function, and the times at which each may have had the traffic."""

    def __init__(self, session: aiohttp.ClientSession, folder: Path) -> None:
        self._session = session
        self._folder = folder
        self._began: list[tuple[int, float]] = []  # versions, and when their deployment was requested
        self._done_s: list[float] = []
        self._revision = 0

    async def deploy(self, version: int) -> None:
        self._folder.mkdir(exist_ok=True)
        (self._folder / "entry.py").write_text(ENTRY.replace("VERSION = 0", f"VERSION = {version}"))
        (self._folder / "wrangler.toml").write_text(MANIFEST)
        data = pack(self._folder)
        digest = digest_of(data)
        await self._send("PUT", f"{PATH}/bundles/{digest}", data)
        self._began.append((version, time.monotonic()))
        wanted = {"digest": digest, "expected_revision": self._revision, "keeps_data": True}
        await self._change("POST", f"{PATH}/{NAME}", wanted)

    async def roll_back(self) -> None:
        """Give the traffic to the previous version, which is not deployed again."""
        self._began.append((self._began[-2][0], time.monotonic()))
        await self._change("POST", f"{PATH}/{NAME}/rollback", {"expected_revision": self._revision})

    def may_have_taken(self, version: int, asked_s: float, answered_s: float) -> bool:
        """Tell whether a version may have had the traffic at some moment between a request and its answer."""
        for place, (each, began_s) in enumerate(self._began):
            replaced_s = self._done_s[place + 1] if place + 1 < len(self._done_s) else float("inf")
            if each == version and began_s <= answered_s and asked_s <= replaced_s:
                return True
        return False

    async def _change(self, method: str, path: str, wanted: dict[str, Any]) -> None:
        changed = json.loads(await self._send(method, path, json.dumps(wanted).encode()))
        self._revision = changed["revision"]
        if changed["unconfirmed"]:
            raise RuntimeError(f"not served in time: {changed['unconfirmed']}")
        self._done_s.append(time.monotonic())

    async def _send(self, method: str, path: str, body: bytes) -> bytes:
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with self._session.request(method, path, data=body, headers=headers) as answer:
            data = await answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {data.decode(errors='replace')[:500]}")
            return data


class Clients:
    """Clients that keep the function busy. `errors` are sentences."""

    def __init__(self, session: aiohttp.ClientSession, rollout: Rollout) -> None:
        self._session = session
        self._rollout = rollout
        self._number = 0
        self.is_over = False
        self._until_s = 0.0  # work that has not ended by then is lost
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self._versions: dict[str, int] = {}  # by id, the version that promised later work
        self._objects: Counter[str] = Counter()
        self._sent: list[str] = []

    async def keep_asking(self, work: Callable[[str], Awaitable[None]]) -> None:
        while not self.is_over:
            self._number += 1
            kind = work.__name__
            try:
                await work(str(self._number))
                self.counts[kind] += 1
            except Exception as error:
                self.errors.append(f"{kind} {self._number}: {type(error).__name__}: {error}")

    async def request(self, id: str) -> None:
        await self._versions_of("request", id=id)

    async def background(self, id: str) -> None:
        self._versions[id] = await self._versions_of("background", id=id)
        await asyncio.sleep(0.1)

    async def send(self, id: str) -> None:
        await self._versions_of("send", id=id)
        self._sent.append(id)
        await asyncio.sleep(0.1)

    async def object(self, id: str) -> None:
        name = str(int(id) % 5)
        self._objects[name] += 1
        _, _, first, last, _ = await self._answer("object", name=name)
        if first != last:
            raise ValueError(f"a call of an object was started by version {first} and ended by {last}")

    async def stream(self, id: str) -> None:
        asked_s = time.monotonic()
        async with self._session.get(f"/fn/{NAME}/stream", params={"id": id}) as answer:
            lines = (await answer.read()).decode().split()
        if len(lines) != 10 or lines[-1] != "end" or len(set(lines[:-1])) != 1:
            raise ValueError(f"{answer.status} {lines}")
        self._check(int(lines[0]), asked_s)

    async def socket(self, id: str) -> None:
        asked_s, versions, number = time.monotonic(), set[int](), 0
        async with self._session.ws_connect(f"/fn/{NAME}/socket") as socket:
            while not self.is_over and number < 40:
                await socket.send_str(str(number))
                message = await socket.receive(30)
                if message.type is not aiohttp.WSMsgType.TEXT:
                    if socket.close_code != 1012:
                        raise ValueError(f"closed with {socket.close_code}")
                    break
                echoed, version = json.loads(message.data)
                if echoed != str(number):
                    raise ValueError(f"{echoed} in place of {number}")
                versions.add(version)
                number += 1
                await asyncio.sleep(0.1)
        if len(versions) > 1:
            raise ValueError(f"versions {versions} in one socket")
        for version in versions:
            self._check(version, asked_s)

    async def check_later(self) -> None:
        """Check the promised work: background work, messages, objects' counts."""
        self._until_s = time.monotonic() + LATER_S
        for id, version in self._versions.items():
            if (kept := await self._eventually(f"background {id}")) != str(version):
                self.errors.append(f"background work {id} of version {version} has kept {kept!r}")
        for id in self._sent:
            runs = json.loads(await self._eventually(f"queue {id}") or "[]")
            if len(runs) != 1 or runs[0][0] != runs[0][1] or runs[0][2] != 1:
                self.errors.append(
                    f"message {id} was handled by {runs} (version at the beginning, at the end, attempts)"
                )
        for name, count in self._objects.items():
            async with self._session.get(f"/fn/{NAME}/count", params={"name": name}) as answer:
                if (kept := await answer.json(content_type=None)) != count:
                    self.errors.append(f"the object {name} was asked {count} times and has kept {kept}")

    async def _versions_of(self, path: str, **params: str) -> int:
        return int((await self._answer(path, **params))[0])

    async def _answer(self, path: str, **params: str) -> list[Any]:
        """Send a request, and check the versions at the beginning and at the end of its answer."""
        asked_s = time.monotonic()
        async with self._session.get(f"/fn/{NAME}/{path}", params=params) as answer:
            text = await answer.text()
        if answer.status != 200:
            raise ValueError(f"{answer.status} {text[:200]}")
        answered: list[Any] = json.loads(text)
        first, last, *_ = answered
        if first != last:
            raise ValueError(f"started by version {first} and ended by {last}")
        self._check(first, asked_s)
        return answered

    def _check(self, version: int, asked_s: float) -> None:
        if not self._rollout.may_have_taken(version, asked_s, time.monotonic()):
            raise ValueError(f"answered by version {version}, which had no traffic then")

    async def _kept(self, key: str) -> Any:
        async with self._session.get(f"/fn/{NAME}/kept", params={"key": key}) as answer:
            return await answer.json(content_type=None)

    async def _eventually(self, key: str) -> Any:
        """Return the value under a key as soon as it exists: work may still be running."""
        while (found := await self._kept(key)) is None and time.monotonic() < self._until_s:
            await asyncio.sleep(0.05)
        return found


async def deploy_under_load(url: str, folder: Path, num_deploys: int, within_s: float, each: int = 2) -> dict[str, Any]:
    """Make the changes with `each` clients of every kind; return counts and errors.

    Pauses between the changes last `within_s` seconds together at most.
    """
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        rollout = Rollout(session, folder)
        await rollout.deploy(1)
        clients = Clients(session, rollout)
        kinds = (clients.request, clients.stream, clients.background, clients.send, clients.object, clients.socket)
        tasks = [asyncio.create_task(clients.keep_asking(kind)) for kind in kinds for _ in range(each)]
        started_s, slowest_s = time.monotonic(), 0.0
        for number in range(2, num_deploys + 1):
            due_s = started_s + within_s * (number - 1) / num_deploys
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            began_s = time.monotonic()
            await (rollout.roll_back() if number % 10 == 0 else rollout.deploy(number))
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            if number % 10 == 0:
                print(
                    f"{number} changes, {sum(clients.counts.values())} answers, {len(clients.errors)} errors",
                    file=sys.stderr,
                )
        clients.is_over = True
        await asyncio.gather(*tasks)
        took_s = time.monotonic() - started_s
        await clients.check_later()
    return {
        "changes": num_deploys, "seconds": round(took_s, 1), "slowest change s": round(slowest_s, 2),
        "answers": dict(clients.counts), "errors": clients.errors,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deploys", type=int, default=100)
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="over which they are spread, if they are quick enough"
    )
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="pilotlight-") as folder,
        LocalNetwork(environment=ENVIRONMENT, num_sites=1, site_settings=SITE) as network,
    ):
        result = asyncio.run(deploy_under_load(network.url, Path(folder) / NAME, options.deploys, options.seconds))
    print(json.dumps({**result, "errors": len(result["errors"])}))
    for error in result["errors"][:50]:
        print(error)
    if not options.no_record:
        print(f"Record: {write_record('deploys', {**result, 'errors': result['errors'][:20]})}")
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
