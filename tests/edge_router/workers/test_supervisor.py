"""A router of two workers: real processes on one port, killed, replaced and drained."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from pilotlight.wire.sse import EventDecoder
from tests.asgi import eventually
from tests.edge_router.fakes import DONE, FakeSite, answer, event, raw_stream, sites
from tests.edge_router.test_continued_responses import Answer, check
from tests.edge_router.test_serve import ROOT, network_file

pytestmark = pytest.mark.process

SECRET = "a secret of sixteen bytes or more"
ITEM = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": []}
RESPONSE = {"id": "resp_1", "object": "response", "status": "completed", "model": "ember", "output": [ITEM]}
ASKED = {"model": "ember", "input": "hello"}
CHAT = {"model": "ember", "stream": True, "messages": [{"role": "user", "content": "hello"}]}


async def answered(session: aiohttp.ClientSession, url: str, status: int) -> None:
    """Wait until the URL is answered with a status."""
    while True:
        async with session.get(url) as response:
            if response.status == status:
                return
        await asyncio.sleep(0.02)


class Routed:
    """A router with several workers, and clients that know the worker of their connection."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, site: FakeSite) -> None:
        self.process, self.url, self.site = process, url, site
        self._sessions: list[aiohttp.ClientSession] = []

    async def client(self, is_wanted: Callable[[int], bool] = lambda _: True) -> tuple[aiohttp.ClientSession, int]:
        """Return a client with one connection to a process that `is_wanted`, and the process's id."""
        async with asyncio.timeout(60):
            while True:
                session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1))
                self._sessions.append(session)
                try:
                    async with session.get(self.url + "/status") as response:
                        pid = (await response.json())["process"]["pid"]
                except aiohttp.ClientError:  # the worker has ended
                    continue
                if is_wanted(pid):
                    return session, pid
                await session.close()
                await asyncio.sleep(0.02)  # a new worker needs the processor, too

    async def workers(self, count: int = 2, without: frozenset[int] = frozenset()) -> dict[int, aiohttp.ClientSession]:
        """Return a client for each of `count` workers, by the worker's process id."""
        found: dict[int, aiohttp.ClientSession] = {}
        while len(found) < count:
            session, pid = await self.client(lambda pid: pid not in found and pid not in without)
            found[pid] = session
        return found

    async def started(self, session: aiohttp.ClientSession) -> aiohttp.ClientResponse:
        """Return a stream that has sent its first event and ends on command."""
        self.site.behave = raw_stream(event(0), end="on command")
        response = await session.post(self.url + "/v1/chat/completions", json=CHAT)
        assert await response.content.readany() == event(0)
        return response

    async def begin_replacing(self) -> None:
        """Have the workers replaced; return when the first successor begins to start."""
        supervisor = psutil.Process(self.process.pid)
        count = len(supervisor.children())
        self.process.send_signal(signal.SIGUSR2)
        async with asyncio.timeout(60):
            while len(supervisor.children()) == count:
                await asyncio.sleep(0.005)

    async def metric(self, pattern: str) -> list[str]:
        session, _ = await self.client()
        async with session.get(self.url + "/metrics") as response:
            return re.findall(pattern, await response.text())

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()


@asynccontextmanager
async def routed(folder: Path, site: FakeSite, extra: str = "", secret: str = SECRET) -> AsyncIterator[Routed]:
    """Start a router; `secret` is its environment's, empty if its file names one."""
    site.secret = SECRET
    file = network_file(folder, site.url, extra=extra)
    state = {"XDG_STATE_HOME": str(folder / "state"), **({"PILOTLIGHT_HOP_SECRET": secret} if secret else {})}
    log = folder / "router.log"
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pilotlight.edge_router", str(file), "--workers", "2",
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), **state}, stderr=written,
        )  # fmt: skip
    url = None
    while url is None:
        assert process.returncode is None, log.read_text()
        await asyncio.sleep(0.02)
        url = re.search(r"listening on (\S+) with 2 workers", log.read_text())
    made = Routed(process, url[1], site)
    try:
        async with asyncio.timeout(60):
            for session in (await made.workers()).values():
                await answered(session, made.url + "/readyz", 200)
        yield made
    finally:
        await made.close()
        if process.returncode is None:
            process.kill()  # its workers then end, too
        await process.wait()


async def test_a_worker_that_is_killed_costs_its_own_streams_and_is_replaced(tmp_path: Path) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        (killed, other) = (await router.workers()).items()
        lost, kept = await router.started(killed[1]), await router.started(other[1])
        os.kill(killed[0], signal.SIGKILL)
        with pytest.raises(aiohttp.ClientError):
            await lost.read()
        site.go_on.set()
        assert await kept.read() == event(99) + DONE
        later = await router.workers(without=frozenset({killed[0]}))
        assert other[0] in later
        for session in later.values():
            async with session.post(router.url + "/v1/chat/completions", json=CHAT) as response:
                assert (await response.read()).endswith(DONE)


async def test_workers_are_replaced_one_by_one_without_a_lost_stream(tmp_path: Path) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        before = await router.workers()
        streams = [await router.started(session) for session in before.values()]
        router.process.send_signal(signal.SIGUSR2)
        after = await router.workers(without=frozenset(before))
        for session in after.values():
            site.go_on.set()
            async with session.post(router.url + "/v1/chat/completions", json=CHAT) as response:
                assert (await response.read()).endswith(DONE)
        for stream in streams:
            assert await stream.read() == event(99) + DONE
        async with asyncio.timeout(60):
            while any(psutil.pid_exists(pid) for pid in before):
                await asyncio.sleep(0.02)


async def test_workers_with_a_ledger_are_replaced_while_the_old_ones_still_count(tmp_path: Path) -> None:
    ledger = (
        f'[ledger]\ndirectory = "{tmp_path}/ledger"\nstore = "postgresql://x@127.0.0.1:1/x"\nwhen_failing = "serve"'
    )
    async with sites("ams1") as [site], routed(tmp_path, site, ledger) as router:
        before = await router.workers()
        streams = [await router.started(session) for session in before.values()]
        router.process.send_signal(signal.SIGUSR2)
        await router.workers(without=frozenset(before))
        site.go_on.set()
        for stream in streams:
            assert await stream.read() == event(99) + DONE


async def test_a_worker_that_is_killed_while_its_successor_starts_gets_no_other_one(tmp_path: Path) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        before = await router.workers()
        await router.begin_replacing()
        os.kill(min(before), signal.SIGKILL)
        after = await router.workers(without=frozenset(before))
        async with asyncio.timeout(60):
            while any(psutil.pid_exists(pid) for pid in before):
                await asyncio.sleep(0.02)
        assert {process.pid for process in psutil.Process(router.process.pid).children()} == after.keys()


async def test_workers_are_replaced_although_a_hangup_comes_meanwhile(tmp_path: Path) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        before = await router.workers()
        await router.begin_replacing()
        router.process.send_signal(signal.SIGHUP)
        for session in (await router.workers(without=frozenset(before))).values():
            await answered(session, router.url + "/readyz", 200)


async def test_a_request_on_an_old_connection_is_answered_while_its_worker_retires(tmp_path: Path) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        before = await router.workers()
        idle, pid = await router.client()
        open_stream = await router.started(before[pid])  # keeps the worker running
        router.process.send_signal(signal.SIGUSR2)
        await router.workers(without=frozenset(before))
        async with idle.get(router.url + "/status") as response:
            assert response.status == 200
        site.go_on.set()
        assert await open_stream.read() == event(99) + DONE


async def test_workers_that_are_replaced_sign_with_the_secret_that_the_file_has_then(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    in_file = f'hop = {{secret_file = "{tmp_path}/secret"}}'
    async with sites("ams1") as [site], routed(tmp_path, site, in_file, secret="") as router:
        before = await router.workers()
        site.secret = "another secret of sixteen bytes"
        (tmp_path / "secret").write_text(site.secret)
        router.process.send_signal(signal.SIGUSR2)
        for session in (await router.workers(without=frozenset(before))).values():
            await answered(session, router.url + "/readyz", 200)


async def test_a_stop_drains_every_worker(tmp_path: Path) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        streams = [await router.started(session) for session in (await router.workers()).values()]
        router.process.send_signal(signal.SIGTERM)
        site.go_on.set()
        for stream in streams:
            assert await stream.read() == event(99) + DONE
        assert await router.process.wait() == 0


async def test_a_hangup_reaches_every_worker(tmp_path: Path) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        clients = (await router.workers()).values()
        network_file(
            tmp_path, site.url, extra=f'[door]\nrequire_key = true\n[[keys]]\nname = "a"\nkey_sha256 = "{"0" * 64}"\n'
        )
        router.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(60):
            for session in clients:
                await answered(session, router.url + "/metrics", 401)


async def test_any_worker_answers_with_the_metrics_of_all(tmp_path: Path) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        for session in (await router.workers()).values():
            async with session.post(router.url + "/v1/chat/completions", json=CHAT) as response:
                await response.read()
        for _ in range(2):
            counts = await router.metric(r'router_requests_total\{worker="(\d)",outcome="ok",site="ams1"\} (\S+)')
            assert sorted(counts) == [("0", "1.0"), ("1", "1.0")]


async def test_a_stored_response_is_found_through_any_worker(tmp_path: Path) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        site.behave = answer(200, RESPONSE)
        clients = [*(await router.workers()).values()]
        for asking in clients:
            async with asking.post(router.url + "/v1/responses", json=ASKED) as response:
                text = await response.text()
                assert response.status == 200, text
            for reading in clients:
                async with reading.get(f"{router.url}/v1/responses/{json.loads(text)['id']}") as found:
                    assert (found.status, (await found.json())["id"]) == (200, json.loads(text)["id"])


async def test_stored_responses_are_found_while_the_worker_that_keeps_them_is_replaced_or_killed(
    tmp_path: Path,
) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        site.behave = answer(200, RESPONSE)
        before = await router.workers()
        async with before[min(before)].post(router.url + "/v1/responses", json=ASKED) as response:
            made = (await response.json())["id"]
        streams = [await router.started(session) for session in before.values()]
        router.process.send_signal(signal.SIGUSR2)
        after = await router.workers(without=frozenset(before))
        for session in after.values():
            async with session.get(f"{router.url}/v1/responses/{made}") as found:
                assert found.status == 200, "the old first worker still has it"
        site.go_on.set()
        for stream in streams:
            assert await stream.read() == event(99) + DONE
        async with asyncio.timeout(60):
            while any(psutil.pid_exists(pid) for pid in before):
                for session in after.values():
                    async with session.get(f"{router.url}/v1/responses/{made}") as found:
                        assert found.status == 200, await found.text()
        for killed in list(after):
            os.kill(killed, signal.SIGKILL)
            session, _ = await router.client(lambda pid: pid not in after)
            async with session.get(f"{router.url}/v1/responses/{made}") as found:
                assert found.status == 200, "the request waits for the successor"


def has_responses(pid: int) -> bool:
    """Tell whether a worker is the one that keeps responses."""
    return any("responses.sqlite" in file.path for file in psutil.Process(pid).open_files())


async def events_of(response: aiohttp.ClientResponse, number: int | None = None) -> list[dict[str, Any]]:
    """Return the events of a stream: all, or the first `number` of them."""
    decoder, events = EventDecoder(), list[dict[str, Any]]()
    assert response.status == 200, await response.text()
    async for chunk in response.content.iter_any():
        events += [json.loads(each.data) for each in decoder.feed(chunk) if each.data is not None]
        if number is not None and len(events) >= number:
            break
    return events


async def test_a_worker_that_is_killed_in_mid_response_costs_no_background_response(tmp_path: Path) -> None:
    url, stored = "/v1/responses", f'[responses]\ndirectory = "{tmp_path}"\n'
    async with sites("ams1") as [site], routed(tmp_path, site, stored) as router:
        for _ in range(2):  # the second time the worker is killed that continued the responses of the first one
            site.behave = Answer(until=4)
            workers = await router.workers()
            async with workers[min(workers)].get(f"{router.url}{url}/resp_unknown") as response:
                assert response.status == 404  # the store is open now
            [first] = filter(has_responses, workers)
            [other] = workers.keys() - {first}
            begun = []
            for session in workers.values():
                async with session.post(
                    router.url + url, json={**ASKED, "background": True, "stream": True}
                ) as response:
                    begun.append(await events_of(response, 5))
            (session, _), (sockets, _) = [await router.client({other}.__contains__) for _ in range(2)]
            async with (
                session.post(router.url + url, json={**ASKED, "stream": True}) as cut,
                sockets.ws_connect(router.url + url) as socket,
            ):
                await events_of(cut, 5)
                await socket.send_json({"type": "response.create", **ASKED})
                assert (await socket.receive_json(timeout=60))["type"] == "response.created"
                site.behave = Answer()
                os.kill(first, signal.SIGKILL)
                last = (await events_of(cut))[-1]
                assert (last["type"], last["code"]) == ("error", "upstream_lost")
                while (last := await socket.receive_json(timeout=60))["type"] != "error":
                    continue
                assert last["error"]["code"] == "upstream_lost"
            for early in begun:
                [after] = (await router.workers(1, frozenset({first}))).values()
                name = early[0]["response"]["id"]
                async with after.get(f"{router.url}{url}/{name}?stream=true&starting_after=4") as response:
                    rest = await events_of(response)
                async with after.get(f"{router.url}{url}/{name}") as response:
                    check([*early, *rest], await response.json())


async def test_a_worker_that_is_replaced_may_become_the_first_one(tmp_path: Path) -> None:
    async with sites("ams1") as [site], routed(tmp_path, site) as router:
        site.behave = answer(200, RESPONSE)
        old = await router.workers()
        async with old[min(old)].post(router.url + "/v1/responses", json=ASKED) as response:
            made = (await response.json())["id"]
        streams = {pid: await router.started(session) for pid, session in old.items()}
        router.process.send_signal(signal.SIGUSR2)
        new = await router.workers(without=frozenset(old))
        [first] = filter(has_responses, old)
        for pid in new:
            os.kill(pid, signal.SIGSTOP)  # so that the other old one is in time
        os.kill(first, signal.SIGKILL)
        [other] = old.keys() - {first}
        await eventually(lambda: has_responses(other))
        for pid in new:
            os.kill(pid, signal.SIGCONT)
        for session in new.values():
            async with session.get(f"{router.url}/v1/responses/{made}", timeout=aiohttp.ClientTimeout(30)) as found:
                assert found.status == 200, await found.text()
        site.go_on.set()
        assert await streams[other].read() == event(99) + DONE
