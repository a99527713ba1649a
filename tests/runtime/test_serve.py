"""A real server on a real socket: effects that only occur with sockets."""

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import h2.connection
import h2.events
import httpx
import pytest

from pilotlight.runtime.serve import ShutdownHooks, drain, load_changed, reload
from pilotlight.sites.site import load_site
from tests.asgi import eventually, start
from tests.fakes import says
from tests.runtime.conftest import Site, SiteMaker

pytestmark = pytest.mark.process

CHAT = "/ai/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


async def connect(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = site.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


def request_bytes(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_a_chat_over_http(server: Site) -> None:
    async with httpx.AsyncClient(base_url=server.url) as client:
        answer = await client.post(CHAT, json=HELLO)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello, world"
        assert answer.headers["x-pilotlight-site"] == "ams1"
        assert "server" not in answer.headers
        status = (await client.get("/status")).json()
        assert status["processes"][0]["url"] == server.url
        assert status["processes"][0]["pid"] == os.getpid()


async def test_a_connection_that_its_client_has_left_is_closed(server: Site) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for body in (HELLO, {**HELLO, "stream": True}):
        for _ in range(10):
            reader, writer = await connect(server)
            writer.write(request_bytes(body))
            await reader.readuntil(b"finish_reason")
            await close(writer)
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


async def test_events_arrive_as_they_are_made(server: Site) -> None:
    second = asyncio.Event()
    server.engine.script = [*says("one", finish=None), second, *says("two")]
    async with (
        httpx.AsyncClient(base_url=server.url) as client,
        client.stream("POST", CHAT, json={**HELLO, "stream": True}) as answer,
    ):
        seen = ""
        async for text in answer.aiter_text():
            seen += text
            if '"one"' in seen:
                second.set()
    assert '"two"' in seen
    assert seen.endswith("data: [DONE]\n\n")


async def test_a_20_mb_body_is_refused_and_the_next_request_is_served(server: Site) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
        large = b'{"model": "tiny", "messages": [{"role": "user", "content": "' + b"x" * 20_000_000 + b'"}]}'
        answer = await client.post(CHAT, content=large)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

        async def chunks() -> Any:
            for _ in range(200):
                yield b"x" * 100_000

        answer = await client.post(CHAT, content=chunks())
        assert answer.status_code == 413
        assert (await client.post("/nothing", content=large)).status_code == 404
        assert (await client.post(CHAT, json=HELLO)).status_code == 200


@pytest.mark.parametrize("has_data", [False, True])
async def test_resetting_an_http2_stream_aborts_it_alone(make_server: SiteMaker, has_data: bool) -> None:
    async with make_server(door={"http2": True}) as server:
        await reset_one_of_two(server, has_data)


async def reset_one_of_two(server: Site, has_data: bool) -> None:
    server.engine.script = [*says("Hello", finish=None), 30] if has_data else [30]
    reader, writer = await connect(server)
    http2 = h2.connection.H2Connection()
    http2.initiate_connection()
    for stream_id in (1, 3):
        path = [(":method", "POST"), (":path", CHAT), (":scheme", "http"), (":authority", "localhost")]
        http2.send_headers(stream_id, path)
        http2.send_data(stream_id, json.dumps({**HELLO, "stream": True}).encode(), end_stream=True)
    writer.write(http2.data_to_send())
    seen: set[int] = set()
    while has_data and seen != {1, 3}:
        for event in http2.receive_data(await reader.read(65536)):
            if isinstance(event, h2.events.DataReceived):
                seen.add(event.stream_id)
    await eventually(lambda: len(server.engine.open) == 2)
    http2.reset_stream(1)
    writer.write(http2.data_to_send())
    await eventually(lambda: server.admission.inflight == 1)
    assert len(server.engine.aborted) == 1
    await close(writer)
    await server.is_idle()


async def test_a_drain_lets_open_streams_finish_and_refuses_new_ones(make_server: SiteMaker) -> None:
    async with make_server() as site:
        gate = asyncio.Event()
        site.engine.script = [*says("one", finish=None), gate, *says("two")]
        async with (
            httpx.AsyncClient(base_url=site.url) as client,
            client.stream("POST", CHAT, json={**HELLO, "stream": True}) as answer,
        ):
            texts = answer.aiter_text()
            assert "one" in await anext(texts)
            site.stop.set()
            await eventually(lambda: site.admission.draining)
            ready = await client.get("/readyz")
            assert (ready.status_code, ready.json()["reasons"]) == (503, ["the site is draining"])
            assert (await client.get("/status")).json()["draining"] is True
            refused = await client.post(CHAT, json=HELLO)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert int(refused.headers["retry-after"]) > 0
            gate.set()
            rest = "".join([text async for text in texts])
        assert "two" in rest
        assert rest.endswith("data: [DONE]\n\n")
        await eventually(lambda: site.launcher.hosts[0].is_stopped)
    assert site.admission.inflight == 0


async def test_a_drain_sends_away_requests_that_wait_for_a_model_to_wake(
    make_server: SiteMaker, model_directory: Path
) -> None:
    models = [{"name": "tiny", "source": str(model_directory), "residency": "disk"}]
    async with make_server(models=models, limits={"drain_timeout_s": 60.0}) as site, httpx.AsyncClient() as http:
        await eventually(lambda: site.launcher.hosts)
        site.engine.load_gate = asyncio.Event()
        url = site.url + "/ai/v1/chat/completions"
        waiting = [asyncio.create_task(http.post(url, json={**HELLO, "stream": stream})) for stream in (False, True)]
        await eventually(lambda: site.app.site.models.states["tiny"].demand.waiters == 2)
        site.stop.set()
        for answer in await asyncio.wait_for(asyncio.gather(*waiting), 60):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
            assert int(answer.headers["retry-after"]) >= 1
        await site.is_idle()
        assert site.app.site.models.states["tiny"].demand.queued == 0


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error_event(make_server: SiteMaker) -> None:
    async with make_server(limits={"drain_timeout_s": 0.1}) as site:
        site.engine.script = [*says("one", finish=None), 30]
        async with (
            httpx.AsyncClient(base_url=site.url) as client,
            client.stream("POST", CHAT, json={**HELLO, "stream": True}) as answer,
        ):
            texts = answer.aiter_text()
            assert "one" in await anext(texts)
            site.stop.set()
            rest = "".join([text async for text in texts])
        error = json.loads(rest.rpartition("data: ")[2])["error"]
        assert error["code"] == "engine_error"
        assert "shutting down" in error["message"]
    assert site.admission.inflight == 0


async def test_a_second_signal_cuts_the_drain_short(make_site: SiteMaker) -> None:
    async with make_site() as site:
        site.engine.script = [*says("one", finish=None), 30]
        exchange = start(site.app, CHAT, {**HELLO, "stream": True})
        await exchange.until(b"one")
        stopping = asyncio.get_running_loop().create_task(
            drain(site.app.site, force_shutdown := asyncio.Event(), ShutdownHooks())
        )
        await eventually(lambda: site.admission.draining)
        assert not exchange.task.done()
        force_shutdown.set()
        await asyncio.wait_for(stopping, 60)
        await exchange.done()
        assert "shutting down" in exchange.events[-1]["error"]["message"]


def site_file(tmp_path: Path, **values: Any) -> Path:
    file = tmp_path / "ams1.toml"
    port, source = values.get("port", 0), values.get("source", "embedded:nothing")
    file.write_text(
        'name = "ams1"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n'
        f'[listen]\nport = {port}\n[[models]]\nname = "m"\nsource = "{source}"\n' + values.get("more", "")
    )
    return file


def serve_process(file: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pilotlight.runtime", str(file)], capture_output=True, text=True, timeout=30
    )


def test_a_site_that_cannot_start_says_why_and_exits_with_1(tmp_path: Path, model_directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        taken = serve_process(site_file(tmp_path, port=port, source=model_directory))
        assert (taken.returncode, taken.stderr.count("\n")) == (1, 1)
        assert f"port {port} on 127.0.0.1 is in use" in taken.stderr
    missing = serve_process(site_file(tmp_path, source="/no/such/directory"))
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    assert "there is no directory /no/such/directory" in missing.stderr
    misspelt = serve_process(site_file(tmp_path, more="[limits]\nmax_inflght = 3\n"))
    assert misspelt.returncode == 1
    assert "did you mean 'max_inflight'" in misspelt.stderr


def test_a_site_with_models_says_what_to_install_where_torch_is_missing(tmp_path: Path, model_directory: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from pilotlight.runtime import serve\n"
        "serve.find_spec = lambda name: None\n"
        "sys.exit(serve.serve_file(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(site_file(tmp_path, source=str(model_directory)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "models need torch, which is not installed: `pip install 'torch>=2.11,<2.14' --index-url" in done.stderr


def test_a_site_whose_function_cannot_have_its_bindings_says_which_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "f/src").mkdir(parents=True)
    (tmp_path / "f/src/entry.py").touch()
    manifest = 'name = "f"\nmain = "src/entry.py"\n[assets]\nbinding = "FILES"\ndirectory = "nowhere"\n'
    (tmp_path / "f/wrangler.toml").write_text(manifest)
    table = f'[functions]\nstate_dir = "{tmp_path}/state"\nserve = [{{ name = "f", path = "{tmp_path}/f" }}]\n'
    done = serve_process(site_file(tmp_path, source="embedded:ember", more=table))
    assert done.returncode == 1
    assert "cannot start" in done.stderr
    assert "assets.directory names 'nowhere', which does not exist" in done.stderr
    assert "Traceback" not in done.stderr


SERVING = """
import asyncio, json, sys
from pathlib import Path
from pilotlight.runtime.app import build_app
from pilotlight.runtime.serve import serve_app
from tests.fakes import FakeLauncher, write_model_directory
from tests.runtime.conftest import site_config
from pilotlight.wire.http.listen import bind

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}

async def asked(url, method, path, body=b""):
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write(f"{method} {path} HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return answer.split(b" ", 2)[1].decode()

async def main():
    config = site_config(write_model_directory(Path(sys.argv[1]) / "tiny"))
    app, stop = build_app(config, launchers=[FakeLauncher()]), asyncio.Event()
    ready = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve_app(app, bind("127.0.0.1", 0), stop=stop, on_ready=ready.set_result))
    url = await ready
    for path in ("/livez", "/readyz", "/status", "/metrics", "/v1/models", "/nothing"):
        print(await asked(url, "GET", path), end=" ")
    for body in (CHAT, {**CHAT, "stream": True}, {"model": 1}):
        print(await asked(url, "POST", "/v1/chat/completions", json.dumps(body).encode()), end=" ")
    stop.set()
    await serving
    print(sorted({name.partition(".")[0] for name in sys.modules} & {"hypercorn", "h2", "h11", "wsproto", "priority", "hpack"}))

asyncio.run(main())
"""


def test_a_site_that_is_asked_for_neither_http2_nor_websockets_never_imports_hypercorn(tmp_path: Path) -> None:
    """The imports would add 50 ms to a cold start."""
    script = [sys.executable, "-c", SERVING, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("200 200 200 200 200 404 200 200 400 []\n", 0), done.stderr


HOSTILE = {
    "bytes in a path": (b"GET /\xff\xc3\xa9 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", (400, 404)),
    "an escaped byte": (b"GET /fn/%ff%00 HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", (404,)),
    "bytes in a header": (b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: \xff\xfe\r\nconnection: close\r\n\r\n", (200,)),
    "a bare line end": (b"GET /livez HTTP/1.1\nhost: localhost\n\n", (400,)),
    "two framings": (
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", (400,),
    ),
    "no host": (b"GET /livez HTTP/1.1\r\n\r\n", (400,)),
    "a tunnel": (b"CONNECT x:443 HTTP/1.1\r\nhost: localhost\r\n\r\n", (400,)),
    "the server itself": (b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", (404,)),
    "another's target": (b"GET http://y/livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", (200,)),
    "a long head": (b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 200_000 + b"\r\n\r\n", (431,)),
    "many headers": (b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 2000 + b"\r\n", (431,)),
    "an old client": (b"GET /livez HTTP/1.0\r\n\r\n", (200,)),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400,)),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_strange_request_has_its_own_answer_and_the_next_is_served(server: Site, kind: str) -> None:
    sent, statuses = HOSTILE[kind]
    reader, writer = await connect(server)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 60)
    assert int(answer.split(b" ", 2)[1]) in statuses
    await close(writer)
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.post(CHAT, json=HELLO)).status_code == 200


async def test_as_many_headers_as_a_router_lets_through_are_taken_with_its_own(server: Site) -> None:
    async with httpx.AsyncClient(base_url=server.url) as client:
        headers = {f"x-{number}": "y" * 450 for number in range(200)}
        assert (await client.get("/livez", headers=headers)).status_code == 200


def test_the_runtime_never_imports_torch() -> None:
    """The import would take 2 to 4 s, and 200 MB of memory, in a process that only serves HTTP."""
    code = (
        "import importlib, pkgutil, sys, runtime\n"
        "sys.path.append(f'{runtime.__path__[0]}/functions/sdk')\n"  # as in the processes of functions
        "for module in pkgutil.walk_packages(runtime.__path__, 'runtime.'):\n"
        "    if not module.name.startswith('pilotlight.runtime.cli') and module.name != 'pilotlight.runtime.__main__':\n"
        "        importlib.import_module(module.name)\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


async def test_a_hangup_reads_the_sites_keys_again(
    server: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ams1.toml"
    place = '{city = "A", latitude = 0.0, longitude = 0.0}'
    written = f'name = "ams1"\nplace = {place}\n[listen]\nport = 0\n[[models]]\nname = "tiny"\nsource = "/nowhere"\n'
    file.write_text(written)
    server.app.site.config = load_site(file)
    digest = hashlib.sha256(b"secret").hexdigest()
    file.write_text(
        f'{written}[limits]\nmax_inflight = 3\n[door]\nrequire_key = true\n[[keys]]\nname = "a"\nkey_sha256 = "{digest}"\n'
    )
    async with httpx.AsyncClient(base_url=server.url) as client:
        assert (await client.post(CHAT, json=HELLO)).status_code == 200
        reload(server.app.site, file)
        assert (await client.post(CHAT, json=HELLO)).status_code == 401
        assert (await client.post(CHAT, json=HELLO, headers={"authorization": "Bearer secret"})).status_code == 200
    assert f"{file} was read again; a restart is needed for limits.max_inflight" in caplog.text


def test_a_networks_router_is_that_of_its_deployments_unless_the_sites_file_names_one(tmp_path: Path) -> None:
    text = (
        'name = "ams1"\nplace = {city = "Amsterdam", latitude = 52.31, longitude = 4.76}\nlisten = {port = 1}\n'
        '[[models]]\nname = "m"\nsource = "embedded:ember"\n'
    )
    (plain := tmp_path / "plain.toml").write_text(text)
    (named := tmp_path / "named.toml").write_text(text + '[functions]\ndeployments = "http://router.example"\n')
    site = load_changed("embedded:ember", "http://127.0.0.1:8787", plain)
    assert (site.functions.deployments, [model.source for model in site.models]) == (
        "http://127.0.0.1:8787", ["embedded:ember"],
    )  # fmt: skip
    assert load_changed(None, "http://127.0.0.1:8787", named).functions.deployments == "http://router.example"
    assert load_changed(None, None, plain) == load_site(plain)
