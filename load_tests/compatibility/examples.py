"""The public examples of Python Workers, run as their READMEs describe.

They come from github.com/cloudflare/python-workers-examples, and get the requests of their tests:

    python -m load_tests.compatibility.examples PATH [NAME ...]

PATH is a clone of the repository. Internet hosts are answered by stand-ins on this machine; where an example names a model of Workers AI, `pilotlight
dev --model NAME=ember` answers. Prints a table with the reason for each failure.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from aiohttp import WSMsgType, web

from load_tests.compatibility.dev_server import UNCOPIED, DevServer, pilotlight
from load_tests.compatibility.stand_ins import StandIns

Check = Callable[[DevServer], Awaitable[None]]
PAGE = "<html><head><title>Example Domain</title><meta property='og:title' content='old'></head><body><h1>Example Domain</h1></body></html>"


class Example(NamedTuple):
    name: str
    check: Check
    before: tuple[tuple[str, ...], ...] = ()  # commands of the README, except `uv run pywrangler`
    options: tuple[str, ...] = ()  # options of `pilotlight dev`
    folder: str = ""  # the function's folder within the example


async def check_hello(server: DevServer) -> None:
    async with server.session.get("/") as response:
        assert await response.text() == "Hello world!"
        assert response.headers["content-type"] == "text/plain;charset=UTF-8"


async def check_binding(server: DevServer) -> None:
    assert await server.text("/") == "baz"


async def check_fastapi(server: DevServer) -> None:
    assert "FastAPI with Jinja2" in await server.text("/")
    assert await server.text("/hi/Dominik") == '{"message":"Hello, Dominik!"}'
    assert "My env var" in await server.text("/env")


async def check_d1(server: DevServer) -> None:
    assert json.loads(await server.text("/"))["author"] in ("Wikipedia", "Dominik Picheta", "Hood Chatham")


async def check_langchain(server: DevServer) -> None:
    assert json.loads(await server.text("/"))["result"]


async def check_assets(server: DevServer) -> None:
    kinds = {
        "": "text/html; charset=utf-8",
        "image.svg": "image/svg+xml",
        "style.css": "text/css; charset=utf-8",
        "script.js": "text/javascript; charset=utf-8",
        "favicon.ico": "image/vnd.microsoft.icon",
        "painting.jpg": "image/jpeg",
    }
    for path, kind in kinds.items():
        async with server.session.get(f"/{path}") as response:
            assert (response.status, response.headers["content-type"]) == (200, kind), path


async def check_objects(server: DevServer) -> None:
    assert await server.text("/room-1/show") == "No messages"
    assert await server.text("/room-1/add/hi") == "Message sent"
    assert await server.text("/room-1/show") == "hi"
    assert await server.text("/room-2/show") == "No messages"


async def check_cron(server: DevServer) -> None:
    assert "Hello from Cron Worker" in await server.text("/")
    await server.text("/cdn-cgi/handler/scheduled?cron=*+*+*+*+*")
    assert await server.printed("Scheduled task has been executed."), "its scheduled handler has printed nothing"


async def check_ai(server: DevServer) -> None:
    output = json.loads(await server.text("/"))
    assert output[0]["content"][0]["text"], output


async def check_workflows(server: DevServer) -> None:
    assert "/start" in await server.text("/")
    id = (await server.text("/start")).rpartition("ID: ")[2].strip()
    status: dict[str, object] = {}
    for _ in range(60):  # the workflow's steps take up to 15 s
        status = json.loads(await server.text(f"/status/{id}"))
        if status["status"] not in ("queued", "running", "waiting"):
            break
        await asyncio.sleep(1)
    assert status["status"] == "complete", status
    assert await server.printed("I awaited the first two steps"), "its last step has printed nothing"


async def check_opengraph(server: DevServer) -> None:
    text = await server.text("/blog/a-b")
    assert '<meta property="og:title" content="Blog Post: A B" />' in text, text[:500]
    assert "old" not in text, "the page's own tags are still there"


async def check_images(server: DevServer) -> None:
    assert "<html" in (await server.text("/")).lower()
    for path in ("gradient?width=60&height=30&color1=FF6B6B&color2=4ECDC4", "badge?text=Hi", "placeholder", "chart"):
        async with server.session.get(f"/{path}") as response:
            data = await response.read()
            assert (response.status, data[:4]) == (200, b"\x89PNG"), f"{path}: {response.status} {data[:300]!r}"


async def check_rpc(server: DevServer) -> None:
    assert "Python RPC server is running" in await server.text("/")


async def check_stream(server: DevServer) -> None:
    await server.text("/status")
    assert await server.printed("Connected to Bluesky"), "it has not connected"
    assert await server.text("/status") == "Firehose status: connected"
    assert await server.printed("Post record"), "no message has arrived"


async def check_chatroom(server: DevServer) -> None:
    assert "<html" in (await server.text("/")).lower()
    async with server.session.ws_connect("/room/one") as one, server.session.ws_connect("/room/one") as other:
        await one.send_str(json.dumps({"username": "a", "text": "hello"}))
        async with asyncio.timeout(10):
            async for message in other:
                if message.type is WSMsgType.TEXT and json.loads(message.data).get("text") == "hello":
                    return
    raise AssertionError("the other client has heard nothing")


async def check_sync_clients(server: DevServer) -> None:
    results = json.loads(await server.text("/sync"))["results"]
    assert [each["client"] for each in results] == ["requests", "urllib3", "httpx.Client"]
    assert all(each["ok"] and each["saw_expected_text"] for each in results), results


async def check_dynamic(server: DevServer) -> None:
    assert await server.text("/") == "Hello from a dynamically-loaded Python Worker!"


async def check_django(server: DevServer) -> None:
    assert await server.text("/") == '{"message": "Hello from Django on Cloudflare Workers!"}'


async def check_todo(server: DevServer) -> None:
    assert json.loads(await server.text("/api/health/")) == {"status": "ok"}
    assert "Django TODO + D1" in await server.text("/")
    async with server.session.post("/api/todos/", json={"title": "Write"}) as response:
        assert response.status == 201, await response.text()
        todo = (await response.json())["todo"]
    assert todo["id"] in {each["id"] for each in json.loads(await server.text("/api/todos/"))["todos"]}
    async with server.session.post("/api/todos/", json={"title": "   "}) as response:
        assert (response.status, await response.json()) == (400, {"error": "The 'title' field cannot be blank."})
    path = f"/api/todos/{todo['id']}/"
    async with server.session.patch(path, json={"title": "Ship", "completed": True}) as response:
        changed = (await response.json())["todo"]
        assert (changed["title"], changed["completed"]) == ("Ship", True)
    async with server.session.delete(path) as response:
        assert response.status == 204
    await server.text(path, 404)


EXAMPLES = (
    Example("01-hello", check_hello),
    Example("02-binding", check_binding),
    Example("03-fastapi", check_fastapi),
    Example("04-query-d1", check_d1, (("d1", "execute", "quotes", "--local", "--file", "db_init.sql"),)),
    Example("05-langchain", check_langchain, options=("--model", "@cf/meta/llama-3.3-70b-instruct-fp8-fast=ember")),
    Example("06-assets", check_assets),
    Example("07-durable-objects", check_objects),
    Example("08-cron", check_cron),
    Example("09-workers-ai", check_ai, options=("--model", "@cf/openai/gpt-oss-120b=ember")),
    Example("10-workflows", check_workflows),
    Example("11-opengraph", check_opengraph),
    Example("12-image-gen", check_images),
    Example("13-js-api-pygments", check_rpc, folder="py"),  # the example's other half is TypeScript
    Example("14-websocket-stream-consumer", check_stream),
    Example("15-chatroom", check_chatroom),
    Example("16-sync-http-clients", check_sync_clients),
    Example("17-dynamic-py-py", check_dynamic),
    Example("18-django", check_django),
    Example("19-django-todo-d1", check_todo, (("d1", "migrations", "apply", "django-todo-d1", "--local"),)),
)


async def example_page(request: web.Request) -> web.StreamResponse:
    return web.Response(text=PAGE, content_type="text/html")


async def example_firehose(request: web.Request) -> web.StreamResponse:
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    record = {"text": "hello from a stand-in", "createdAt": "2026-01-01T00:00:00Z"}
    commit = {"collection": "app.bsky.feed.post", "operation": "create", "record": record}
    with suppress(ConnectionError):  # the client has disconnected
        while not socket.closed:
            await socket.send_json(
                {"did": "did:x", "time_us": int(time.time() * 1e6), "kind": "commit", "commit": commit}
            )
            await asyncio.sleep(0.2)
    return socket


async def outcome(example: Example, repository: Path, folder: Path, stand_ins: StandIns) -> str:
    """Run one example. Returns why it fails; empty if it passes."""
    copy = folder / example.name
    await asyncio.to_thread(shutil.copytree, repository / example.name / example.folder, copy, ignore=UNCOPIED)
    server = DevServer(copy, list(example.options), stand_ins)
    try:
        for command in example.before:
            await pilotlight(copy, *command)
        async with server:
            await example.check(server)
    except Exception as error:
        last = [line for line in server.output if line.strip()][-3:]
        return f"{type(error).__name__}: {error} | {' / '.join(last)}"
    finally:
        await server.session.close()
    return ""


async def main(repository: Path, names: list[str]) -> int:
    passed, chosen = 0, [each for each in EXAMPLES if not names or any(name in each.name for name in names)]
    handlers = {"example.com": example_page, "jetstream2.us-east.bsky.network": example_firehose}
    with tempfile.TemporaryDirectory(prefix="pilotlight-examples-") as name:
        folder = Path(name)
        os.chmod(folder, 0o755)
        async with StandIns(folder, handlers) as stand_ins:
            print("| example | result | s | reason |\n|---|---|--:|---|")
            for example in chosen:
                began = time.perf_counter()
                why = await outcome(example, repository, folder, stand_ins)
                passed += not why
                reason = " ".join(why.split()).replace("|", "/")[:900]
                took = time.perf_counter() - began
                print(f"| {example.name} | {'FAIL' if why else 'pass'} | {took:.1f} | {reason} |", flush=True)
    print(f"\n{passed} of {len(chosen)} pass")
    return 0 if passed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]), sys.argv[2:])))
