"""A host over TCP obeys only the client that has its keys, and only while that client holds the lease."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from pilotlight.engine.api.client import EngineClient, EngineError
from pilotlight.engine.api.frames import decode_event, encode
from pilotlight.engine.api.keys import Keys, read_keys, write_keys
from pilotlight.engine.api.protocol import VERSION, FrontEndRefused, Hello, HostReady, ModelSpec, UnloadModel
from pilotlight.engine.api.socket_client import SocketEngineClient
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.host.engine_host import EngineHost
from pilotlight.engine.host.socket_transport import FrontEnd, SocketTransport
from tests.engine.driver import submit
from tests.engine.fake_runner import fake_engine

ROOT = Path(__file__).parents[3]
LEASE_S = 1.0
ENDLESS = submit("endless", [1, 2, 3], max_tokens=100_000)


class FakeModel:
    def __init__(self, spec: ModelSpec, engine: Engine) -> None:
        self.spec, self.engine = spec, engine

    def has_whole_cache(self) -> bool:
        return True

    def close(self) -> None:
        pass


class FakeLoader:
    """A loader whose fake model is loaded at once, and whose answers are long and slow."""

    def __init__(self) -> None:
        self.ready: HostReady | None = HostReady(VERSION)
        self.why_ending: str | None = None
        self.engine, _ = fake_engine(num_blocks=50_000)
        self.loaded: list[tuple[ModelSpec, FakeModel]] = []
        step, pause = self.engine.step, threading.Event()

        def step_slowly(*on_held: Any) -> bool:
            pause.wait(0.002)
            return step(*on_held)

        self.engine.step = step_slowly

    def start(self) -> None:
        pass

    def load(self, spec: ModelSpec) -> None:
        self.loaded.append((spec, FakeModel(spec, self.engine)))

    def take_results(self) -> list[Any]:
        results, self.loaded = self.loaded, []
        return results

    def close(self) -> None:
        pass


class Host:
    """An engine host over TCP, run in a thread."""

    def __init__(self, keys: Keys | None) -> None:
        self.address = free_address()
        self.loader = FakeLoader()
        self.host = EngineHost(SocketTransport(self.address, keys), self.loader)
        self.thread = threading.Thread(target=self.host.run)
        self.thread.start()

    @property
    def is_computing(self) -> bool:
        return self.loader.engine.has_work

    def stop(self) -> None:
        self.host.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


def free_address() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def keys(process_tier: None, tmp_path: Path) -> tuple[Keys, Keys]:
    """Return the keys of a host, and those of its client."""
    write_keys(tmp_path / "host", tmp_path / "front_end")
    return read_keys(tmp_path / "host"), read_keys(tmp_path / "front_end")


@pytest.fixture
async def host(keys: tuple[Keys, Keys]) -> AsyncIterator[Host]:
    host = Host(keys[0])
    yield host
    await asyncio.to_thread(host.stop)


@asynccontextmanager
async def front_end(address: str, keys: Keys | None, lease_s: float = LEASE_S) -> AsyncIterator[SocketEngineClient]:
    client = SocketEngineClient(address, keys, lease_s)
    try:
        yield client
    finally:
        client.fail("this test has ended")  # so that `close` does not end a host
        await client.close()


async def is_answered(client: EngineClient) -> None:
    await client.load_model(ModelSpec("tiny", "/nowhere"))
    async with client.generate(submit("short", [4, 5, 6], max_tokens=3)) as outputs:
        assert [output.finish_reason async for output in outputs][-1] == "length"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_the_front_end_with_the_keys_is_served_for_longer_than_a_lease(
    host: Host, keys: tuple[Keys, Keys]
) -> None:
    async with front_end(host.address, keys[1], 0.4) as client:
        await is_answered(client)
        await asyncio.sleep(1.0)
        assert client.death is None
        await is_answered(client)


@pytest.mark.parametrize("which", ["other keys", "the host's own keys", "no keys"])
async def test_a_client_without_the_keys_is_refused_by_name(
    which: str, host: Host, keys: tuple[Keys, Keys], tmp_path: Path
) -> None:
    write_keys(tmp_path / "other_host", tmp_path / "other_front_end")
    theirs = {
        "other keys": replace(read_keys(tmp_path / "other_front_end"), peer=keys[1].peer),
        "the host's own keys": replace(keys[0], peer=keys[0].public),
        "no keys": None,
    }[which]
    async with front_end(host.address, keys[1]) as client, front_end(host.address, theirs) as stranger:
        await is_answered(client)
        with pytest.raises(EngineError, match="keys") as refused:
            await stranger.hello()
        assert host.address in str(refused.value)
        await is_answered(client)


async def test_a_host_that_has_not_the_keys_is_sent_nothing(keys: tuple[Keys, Keys], tmp_path: Path) -> None:
    write_keys(tmp_path / "other_host", tmp_path / "other_front_end")
    host = Host(replace(read_keys(tmp_path / "other_host"), peer=keys[0].peer))
    try:
        async with front_end(host.address, keys[1]) as client:
            with pytest.raises(EngineError, match="keys"):
                await client.load_model(ModelSpec("tiny", "/nowhere"))
    finally:
        await asyncio.to_thread(host.stop)


class Wire:
    """A proxy between a client and a host that records the client's bytes."""

    def __init__(self, address: str) -> None:
        self._port = int(address.rpartition(":")[2])
        self.sent, self.answered = bytearray(), bytearray()

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(self._pass(reader, onward, self.sent), self._pass(there, writer, self.answered))

    @staticmethod
    async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray) -> None:
        while data := await reader.read(65536):
            kept += data
            writer.write(data)
        writer.close()


async def test_bytes_that_were_listened_to_say_nothing_and_do_nothing_a_second_time(
    host: Host, keys: tuple[Keys, Keys]
) -> None:
    async with Wire(host.address) as wire:
        async with front_end(wire.address, keys[1], 0.3) as client:
            await is_answered(client)
        assert wire.sent
        assert wire.answered
        for word in (b"tiny", b"Submit", b"short", b"LoadModel", b"TokenOutput"):
            assert word not in wire.sent + wire.answered
        before = host.loader.engine.load().prompt_tokens
        reader, writer = await asyncio.open_connection("127.0.0.1", int(host.address.rpartition(":")[2]))
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(2):
                for i in range(0, len(wire.sent), 64):  # in pieces, since the handshake alternates
                    writer.write(wire.sent[i : i + 64])
                    await writer.drain()
                    await asyncio.sleep(0.005)
                while await reader.read(65536):  # until the host closes the connection
                    pass
        writer.close()
        assert host.loader.engine.load().prompt_tokens == before
    await is_answered_in_the_end(host.address, keys[1])
    assert host.loader.engine.load().prompt_tokens > before


async def test_a_second_front_end_waits_for_the_lease_of_the_first(host: Host, keys: tuple[Keys, Keys]) -> None:
    async with front_end(host.address, keys[1]) as first:
        await is_answered(first)
        async with front_end(host.address, keys[1]) as second:
            with pytest.raises(EngineError, match="another front end holds this host's lease of 1 s"):
                await second.hello()
        await is_answered(first)
    await is_answered_in_the_end(host.address, keys[1])


async def greeted_in_the_end(address: str, keys: Keys) -> SocketEngineClient:
    """Return a client that holds the host's lease, as soon as no other client holds it."""
    async with asyncio.timeout(60):
        while True:
            client = SocketEngineClient(address, keys, LEASE_S)
            try:
                await client.hello()
                return client
            except EngineError:
                await client.close()


async def is_answered_in_the_end(address: str, keys: Keys) -> None:
    client = await greeted_in_the_end(address, keys)
    await is_answered(client)
    client.fail("this test has ended")
    await client.close()


FRONT_END = f"""
import asyncio, sys
from pathlib import Path
from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.keys import read_keys
from pilotlight.engine.api.protocol import ModelSpec, SamplingParams, Submit
from pilotlight.engine.api.socket_client import SocketEngineClient

async def main():
    client = SocketEngineClient(sys.argv[1], read_keys(Path(sys.argv[2])), {LEASE_S})
    await client.load_model(ModelSpec("tiny", "/nowhere"))
    try:
        async with client.generate(Submit("theirs", "tiny", (1, 2, 3), SamplingParams(100_000))) as outputs:
            await anext(outputs)
            print("reads", flush=True)
            async for output in outputs:
                pass
    except EngineError as error:
        print(error, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_front_end_that_vanishes_leaves_nothing_computing_and_its_place_free(
    how: signal.Signals, host: Host, keys: tuple[Keys, Keys], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", FRONT_END, host.address, str(tmp_path / "front_end")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        try:
            assert await asyncio.to_thread(process.stdout.readline) == "reads\n"
            assert host.is_computing
            process.send_signal(how)
            await until(lambda: not host.is_computing)
            await is_answered_in_the_end(host.address, keys[1])
            if how == signal.SIGSTOP:
                process.send_signal(signal.SIGCONT)
                said = await asyncio.to_thread(process.stdout.readline)
                assert "this front end sent nothing for 1 s, the length of its lease" in said or "went away" in said
        finally:
            process.kill()


async def test_the_silence_of_a_front_end_counts_only_while_the_host_listens() -> None:
    now = [100.0]
    front_end = FrontEnd(b"peer", 3.0, lambda: now[0])
    now[0] += 3600  # the host was stopped or computed a step, and has unread messages
    assert not front_end.is_silent()
    front_end.note_frame()
    looks = 0
    while not front_end.is_silent():
        now[0] += 0.5
        looks += 1
    assert looks == 6


@pytest.mark.process
async def test_a_front_end_without_a_lease_hears_that_another_took_over() -> None:
    host = Host(None)
    try:
        async with front_end(host.address, None) as first, front_end(host.address, None) as second:
            await first.load_model(ModelSpec("tiny", "/nowhere"))
            async with first.generate(ENDLESS) as outputs:
                await anext(outputs)
                await is_answered(second)
                with pytest.raises(EngineError, match="another front end has taken over"):
                    async for _ in outputs:
                        pass
            assert not host.is_computing
            await is_answered(second)
    finally:
        await asyncio.to_thread(host.stop)


@pytest.mark.process
async def test_peers_of_different_versions_refuse_each_other_by_name() -> None:
    host = Host(None)
    later = (VERSION[0] + 1, 0)
    theirs, ours = (f"{first}.{second}" for first, second in (later, VERSION))
    try:
        with zmq.Context() as context, context.socket(zmq.DEALER) as newer:
            newer.connect(host.address)
            newer.send_multipart([encode(Hello(later)), encode(UnloadModel("tiny"))])
            said = [decode_event(await asyncio.to_thread(newer.recv)) for _ in range(2)]
            assert all(isinstance(event, FrontEndRefused) for event in said)
            assert f"version {theirs} of the engine protocol and this host version {ours}" in str(said[0])
        async with front_end(host.address, None) as client:
            await is_answered(client)
        host.loader.ready = HostReady(later)
        async with front_end(host.address, None) as client:
            with pytest.raises(
                EngineError, match=f"version {theirs} of the engine protocol and this front end version {ours}"
            ):
                await client.hello()
    finally:
        await asyncio.to_thread(host.stop)


async def test_a_host_process_on_the_network_serves_clients_with_the_keys_and_is_missed_when_it_is_silent(
    keys: tuple[Keys, Keys], tmp_path: Path
) -> None:
    port = free_address().rpartition(":")[2]
    command = [
        "-m",
        "pilotlight.engine.host.engine_host",
        "--address",
        f"tcp://0.0.0.0:{port}",
        "--keys",
        str(tmp_path / "host"),
    ]
    # The host's parent process ends at once, like a shell on another machine: only the client's lease keeps the host alive.
    script = f"import subprocess, sys; print(subprocess.Popen([sys.executable, *{command!r}], stdout=subprocess.DEVNULL).pid)"
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    pid = int(done.stdout)
    try:
        async with front_end(f"tcp://127.0.0.1:{port}", None) as stranger:
            with pytest.raises(EngineError, match="this front end has none"):
                await stranger.hello()
        async with front_end(f"tcp://127.0.0.1:{port}", keys[1]) as missing:
            assert (await missing.hello()).version == VERSION
            os.kill(pid, signal.SIGSTOP)
            await until(lambda: missing.death is not None)
            os.kill(pid, signal.SIGCONT)
        client = await greeted_in_the_end(f"tcp://127.0.0.1:{port}", keys[1])
        await client.close()
        await until(lambda: not is_alive(pid))
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
