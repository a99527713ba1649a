"""Back up a network under load, restore the backup elsewhere, and look for each acknowledged write.

python -m load_tests.scenarios.backup [--writes 1500] [--rate 100] [--no-record]

A router with a ledger and one site run as processes. Clients ask a function, which writes to D1, KV, R2, a Durable Object and a queue; others
complete prompts, each of which is a record of the ledger. The time of each acknowledgement is noted. `pilotlight backup` runs twice meanwhile. The
second backup is restored into another folder, and read through processes that serve it there. With `--rate` the scenario fails if fewer writes were
acknowledged per second.
"""

import argparse
import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from load_tests.local_network import free_ports
from load_tests.records import write_record
from pilotlight.sites.key_files import new_key

ROOT = Path(__file__).parents[2]
PLACE = '{city = "Amsterdam", latitude = 52.31, longitude = 4.76}'
SECRET = "a secret of sixteen bytes or more"
STORAGES = ("d1", "kv", "r2", "object", "queue")
START_LIMIT_S = 240.0
MANIFEST = """
name = "keeper"
main = "entry.py"
compatibility_date = "2026-01-01"
compatibility_flags = ["python_workers"]
kv_namespaces = [{binding = "KV", id = "kv"}]
d1_databases = [{binding = "DB", database_name = "db", database_id = "db"}]
r2_buckets = [{binding = "BUCKET", bucket_name = "bucket"}]
durable_objects = {bindings = [{name = "LOG", class_name = "Log"}]}
migrations = [{tag = "v1", new_sqlite_classes = ["Log"]}]

[[queues.producers]]
binding = "QUEUE"
queue = "numbers"
"""
FUNCTION = """
from urllib.parse import urlparse

from workers import DurableObject, Response, WorkerEntrypoint

PAGE = 200  # numbers, each of which takes two of the thousand subrequests that a request may make


class Log(DurableObject):
    async def write(self, number):
        await self.ctx.storage.put(f"{number:06d}", number)

    async def written(self):
        return sorted(dict(await self.ctx.storage.list()).values())


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        word, _, number = urlparse(request.url).path.strip("/").partition("/")
        log = self.env.LOG.get(self.env.LOG.idFromName("log"))
        if word == "make":
            await self.env.DB.exec("CREATE TABLE IF NOT EXISTS numbers (n INTEGER PRIMARY KEY)")
        elif word == "write":
            await self.env.KV.put(number, "x" * 100 + number)
            await self.env.DB.prepare("INSERT INTO numbers VALUES (?)").bind(int(number)).run()
            await self.env.BUCKET.put(number, f"object {number} " * 100)
            await log.write(int(number))
            await self.env.QUEUE.send({"number": int(number)})
        elif word == "replace":
            await self.env.BUCKET.put("often", number * 1000)
        elif word == "read":
            page = "SELECT n FROM numbers ORDER BY n LIMIT ? OFFSET ?"
            rows = await self.env.DB.prepare(page).bind(PAGE, PAGE * int(number)).all()
            found = {"d1": [row.n for row in rows.results], "object": [*await log.written()], "kv": [], "r2": []}
            for n in found["d1"]:
                stored, value = await self.env.BUCKET.get(str(n)), await self.env.KV.get(str(n))
                found["r2"] += [n] if stored is not None and await stored.text() == f"object {n} " * 100 else []
                found["kv"] += [n] if value == "x" * 100 + str(n) else []
            often = await self.env.BUCKET.get("often")
            found["often"] = len(set(await often.text()))
            found["secret"] = self.env.TOKEN
            return Response.json(found)
        return Response("done")
"""


class Network:
    """A router with a ledger, and a site with a model and the function, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self._folder = folder
        self._key, known = new_key("acme", ("models",))
        router, site = free_ports(2)
        self.url, self._site_url = f"http://127.0.0.1:{router}", f"http://127.0.0.1:{site}"
        function = folder / "keeper"
        function.mkdir(parents=True)
        (function / "wrangler.toml").write_text(MANIFEST)
        (function / "entry.py").write_text(FUNCTION)
        self.router_file, self.site_file = folder / "network.toml", folder / "ams1.toml"
        self.router_file.write_text(
            f'place = {PLACE}\nlisten = {{port = {router}}}\nledger = {{directory = "{folder}/ledger"}}\n'
            f'health = {{timeout_s = 10}}\n[[keys]]\nname = "acme"\nkey_sha256 = "{known.key_sha256}"\n'
            f'[[sites]]\nname = "ams1"\nurl = "{self._site_url}"\nplace = {PLACE}\n'
        )
        self.site_file.write_text(
            f'name = "ams1"\nplace = {PLACE}\nlisten = {{port = {site}}}\n[engine]\ndevice = "cpu"\nstandby = false\n'
            f'[functions]\nstate_dir = "{self.state}"\nserve = [{{name = "keeper", path = "{function}"}}]\n'
            '[[models]]\nname = "ember"\nsource = "embedded:ember"\n'
        )
        self._environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "PILOTLIGHT_HOP_SECRET": SECRET, "XDG_STATE_HOME": str(folder / "home"),
        }  # fmt: skip

    def command(self, *arguments: str, stdin: str = "") -> str:
        """Run a command of `pilotlight`; return its output. Raises RuntimeError if it fails."""
        command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, input=stdin, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"pilotlight {' '.join(arguments)}: {done.stderr[-1000:]}")
        return done.stdout

    def files(self) -> list[str]:
        return ["--network", str(self.router_file), "--site", str(self.site_file)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Run both processes; yield a client when they serve."""
        with (
            self._process("pilotlight.runtime", self.site_file),
            self._process("pilotlight.edge_router", self.router_file),
        ):
            headers = {"authorization": f"Bearer {self._key}"}
            timeout = aiohttp.ClientTimeout(total=START_LIMIT_S)
            async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
                async with asyncio.timeout(START_LIMIT_S):
                    while not (await self._answers(session, "/fn/keeper/make") and await completes(session, self.url)):
                        await asyncio.sleep(0.1)
                yield session

    def ledger(self) -> Counter[str]:
        """Return how often the ledger has each request."""
        with closing(sqlite3.connect(self._folder / "ledger" / "usage.sqlite")) as connection:
            rows = connection.execute("SELECT request_id FROM usage WHERE account = 'acme' AND output_tokens > 0")
            return Counter(name for (name,) in rows)

    def queued(self) -> int:
        """Return the number of messages in the queue."""
        (queue,) = (self.state / "bindings" / "queue").rglob("*.sqlite")
        with closing(sqlite3.connect(queue)) as connection:
            return int(connection.execute("SELECT count(*) FROM messages").fetchone()[0])

    def torn(self) -> list[str]:
        """Return the databases that SQLite takes for damaged."""
        found = []
        for path in [*self.state.rglob("*.sqlite"), *(self._folder / "ledger").rglob("*.sqlite")]:
            with closing(sqlite3.connect(path)) as connection:
                if connection.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
                    found.append(str(path.relative_to(self._folder)))
        return found

    async def _answers(self, session: aiohttp.ClientSession, path: str) -> bool:
        try:
            async with session.get(self.url + path) as answer:
                await answer.read()
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    @contextmanager
    def _process(self, module: str, file: Path) -> Iterator[None]:
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(file)], cwd=ROOT, env=self._environment, stderr=log
            )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


class Writers:
    """Clients that write until the scope ends, and the times of their acknowledged writes."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.numbers: dict[int, float] = {}  # of the function's requests
        self.requests: dict[str, float] = {}  # ids of the model's requests
        self.began_s = self.ended_s = time.time()
        self._session, self._url, self._next = session, url, 0

    @property
    def num_writes(self) -> int:
        return len(STORAGES) * len(self.numbers) + len(self.requests)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        self.began_s = time.time()
        tasks = [
            asyncio.create_task(work())
            for work in (self._call, self._call, self._call, self._call, self._complete, self._complete)
        ]
        try:
            yield
            self.ended_s = time.time()
            failed = [task for task in tasks if task.done()]
            if failed:
                await failed[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for(self, count: int) -> None:
        """Wait until this many more writes are acknowledged, of both kinds."""
        numbers, requests, writes = len(self.numbers), len(self.requests), self.num_writes
        async with asyncio.timeout(START_LIMIT_S):
            while self.num_writes < writes + count or len(self.numbers) == numbers or len(self.requests) == requests:
                await asyncio.sleep(0.01)

    async def _call(self) -> None:
        while True:
            number, self._next = self._next, self._next + 1
            await self._get(f"write/{number}")
            self.numbers[number] = time.time()
            await self._get(f"replace/{number % 10}")  # the file of this object changes constantly

    async def _get(self, path: str) -> None:
        async with self._session.get(f"{self._url}/fn/keeper/{path}") as answer:
            if answer.status != 200:
                raise RuntimeError(f"{path}: {answer.status} {await answer.text()}")

    async def _complete(self) -> None:
        while True:
            name = await completed(self._session, self._url)
            self.requests[name] = time.time()


async def completed(session: aiohttp.ClientSession, url: str) -> str:
    """Complete a prompt; return the request's id. Raises RuntimeError."""
    async with session.post(f"{url}/v1/completions", json={"model": "ember", "prompt": "A", "max_tokens": 1}) as answer:
        text = await answer.text()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {text}")
        return answer.headers["x-request-id"]


async def completes(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        return bool(await completed(session, url))
    except (aiohttp.ClientError, RuntimeError):
        return False


def measure(num_writes: int) -> dict[str, Any]:
    """Back up twice, each time after `num_writes` writes.

    Restores the second backup and returns what is missing and torn in it."""
    return asyncio.run(_measure(num_writes))


async def _measure(num_writes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pilotlight-backup-") as path:
        folder = Path(path)
        there, elsewhere, backups = Network(folder / "there"), Network(folder / "elsewhere"), folder / "backups"

        async def in_thread(work: Callable[..., str], *arguments: str, stdin: str = "") -> str:
            return await asyncio.to_thread(work, *arguments, stdin=stdin)

        await in_thread(
            there.command, "secret", "put", "keeper", "TOKEN", "--site", str(there.site_file), stdin="a secret"
        )
        async with there.running() as session:
            writers = Writers(session, there.url)
            async with writers.writing():
                await writers.wait_for(num_writes)
                await in_thread(there.command, "backup", str(backups), *there.files())
                await writers.wait_for(num_writes)
                await in_thread(there.command, "backup", str(backups), *there.files())
                await writers.wait_for(1)
        snapshot = json.loads(max((backups / "snapshots").glob("*.json")).read_bytes())
        mark_s = datetime.fromisoformat(snapshot["created"]).timestamp()
        numbers = {number for number, at_s in writers.numbers.items() if at_s <= mark_s}
        requests = {name for name, at_s in writers.requests.items() if at_s <= mark_s}
        await in_thread(elsewhere.command, "restore", str(backups), *elsewhere.files())
        queued = elsewhere.queued()
        async with elsewhere.running() as session:
            found = await _stored(session, elsewhere.url)
        ledger = elsewhere.ledger()
        return {
            "writes_acknowledged": writers.num_writes,
            "writes_per_s": round(writers.num_writes / (writers.ended_s - writers.began_s), 1),
            "acknowledged_before_the_mark": {**dict.fromkeys(STORAGES, len(numbers)), "ledger": len(requests)},
            "missing": {
                **{kind: len(numbers - set(found[kind])) for kind in STORAGES if kind != "queue"},
                "queue": max(0, len(numbers) - queued),
                "ledger": len(requests - ledger.keys()),
            },
            "torn": [*elsewhere.torn(), *([] if found["often"] == 1 else ["an object of two versions"])],
            "twice_in_the_ledger": sorted(name for name, count in ledger.items() if count > 1),
            "secret_is_readable": found["secret"] == "a secret",
        }


async def _stored(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return what the function finds in each storage. Raises RuntimeError."""
    stored: dict[str, list[int]] = {"d1": [], "kv": [], "r2": []}
    for page in count():
        async with session.get(f"{url}/fn/keeper/read/{page}") as answer:
            found: dict[str, Any] = await answer.json()
            if answer.status != 200:
                raise RuntimeError(f"read/{page}: {answer.status} {found}")
        if not found["d1"]:
            return {**found, **stored}
        for kind, numbers in stored.items():
            numbers += found[kind]
    raise AssertionError


def is_right(results: dict[str, Any]) -> bool:
    """Tell whether nothing is missing, torn or counted twice."""
    wrong = (*results["missing"].values(), len(results["torn"]), len(results["twice_in_the_ledger"]))
    return not any(wrong) and bool(results["secret_is_readable"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writes", type=int, default=1500, help="before each of the two backups")
    parser.add_argument("--rate", type=float, default=0.0, help="fewest acknowledged writes per second")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    results = measure(options.writes)
    print(json.dumps(results, indent=2))
    if not options.no_record:
        print("Record:", write_record("backup", results))
    if not is_right(results) or results["writes_per_s"] < options.rate:
        sys.exit(1)


if __name__ == "__main__":
    main()
