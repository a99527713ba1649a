"""A function in a real isolate of a whole site, with every kind of binding."""

import asyncio
import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from pilotlight.functions.bindings.secrets.secret_store import SecretStore
from pilotlight.functions.manifest import ManifestError
from tests.asgi import call, eventually, start
from tests.fakes import says
from tests.runtime.conftest import SiteMaker

pytestmark = pytest.mark.process

MANIFEST = """
name = "f"
main = "src/entry.py"
compatibility_date = "2026-01-01"

[vars]
GREETING = "hello"
SHAPE = { sides = 3 }

[ai]
binding = "AI"

[[kv_namespaces]]
binding = "KV"
id = "things"

[[d1_databases]]
binding = "DB"
database_name = "numbers"
database_id = "numbers"

[[r2_buckets]]
binding = "BUCKET"
bucket_name = "objects"

[[queues.producers]]
binding = "QUEUE"
queue = "jobs"

[[queues.consumers]]
queue = "jobs"
max_batch_timeout = 0

[[services]]
binding = "OTHER"
service = "other"

[assets]
binding = "ASSETS"
directory = "public"

[[ratelimits]]
name = "LIMIT"
namespace_id = "1"
simple = { limit = 2, period = 60 }
"""
ENTRY = """
from workers import Response, WorkerEntrypoint, env as module_env

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        env, what = self.env, request.url.rpartition("/")[2]
        return await getattr(self, what)(env)

    async def values(self, env):
        return Response.json([env.GREETING, env.SHAPE.sides, env.TOKEN, module_env.GREETING])

    async def kv(self, env):
        await env.KV.put("k", "v", {"metadata": {"n": 1}})
        found = await env.KV.getWithMetadata("k")
        listed = await env.KV.list(prefix="k")
        return Response.json([found.value, found.metadata.n, [key.name for key in listed["keys"]], await env.KV.get("none")])

    async def d1(self, env):
        await env.DB.exec("CREATE TABLE IF NOT EXISTS t (n INTEGER);")
        await env.DB.prepare("INSERT INTO t VALUES (?)").bind(7).run()
        try:
            await env.DB.prepare("SELECT * FROM missing").all()
        except Exception as error:
            message = str(error)
        return Response.json([await env.DB.prepare("SELECT n FROM t").first("n"), message])

    async def r2(self, env):
        async def pieces():
            for _ in range(40):
                yield b"x" * 10_000
        await env.BUCKET.put("a/b", pieces())
        found = await env.BUCKET.get("a/b")
        return Response(found.body)

    async def ai(self, env):
        stream = await env.AI.run("tiny", {"prompt": "one two", "stream": True, "max_tokens": 4})
        return Response(stream, headers={"content-type": "text/event-stream"})

    async def ai_error(self, env):
        try:
            await env.AI.run("nobody", {"prompt": "x"})
        except Exception as error:
            return Response.json([error.code, error.status])

    async def send(self, env):
        await env.QUEUE.send({"job": 1})
        return Response("sent")

    async def other(self, env):
        answer = await env.OTHER.fetch("http://other/path")
        return Response.json([await answer.text(), await env.OTHER.add(1, 2)])

    async def responses(self, env):
        small, large, nothing = await env.OTHER.made(3), await env.OTHER.made(200_000), await env.OTHER.made(None)
        pieces = [piece async for piece in await env.OTHER.pieces()]
        lengths = [len(await response.text()) for response in (small, large)]
        return Response.json([small.status, small.headers["x-size"], *lengths, nothing.status, nothing.body, len(b"".join(pieces))])

    async def assets(self, env):
        return await env.ASSETS.fetch("http://assets/page")

    async def limit(self, env):
        return Response.json([(await env.LIMIT.limit({"key": "k"})).success for _ in range(3)])

    async def queue(self, batch):
        for message in batch.messages:
            await self.env.KV.put("job", str(message.body["job"]))
            message.ack()

    async def job(self, env):
        return Response(await env.KV.get("job") or "")
"""
OTHER = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("other at " + request.url)

    async def add(self, a, b):
        return a + b

    async def made(self, size):
        return Response(None, status=204) if size is None else Response("x" * size, status=201, headers={"x-size": str(size)})

    async def pieces(self):
        async def some():
            for _ in range(3):
                yield b"piece"
        return some()
"""


def two_functions(folder: Path, manifest: str = MANIFEST) -> dict[str, Any]:
    """Return the [functions] table of a site file that serves two functions."""
    for name, text, source in (("f", manifest, ENTRY), ("other", 'name = "other"\nmain = "src/entry.py"\n', OTHER)):
        (folder / name / "src").mkdir(parents=True)
        (folder / name / "src/entry.py").write_text(dedent(source))
        (folder / name / "wrangler.toml").write_text(text)
    (folder / "f/public").mkdir()
    (folder / "f/public/page.html").write_text("<p>page")
    return {"directory": str(folder), "state_dir": str(folder / "state"), "show_errors": True}


async def test_every_binding_works_inside_a_function(make_site: SiteMaker, tmp_path: Path) -> None:
    table = two_functions(tmp_path / "functions")
    SecretStore(Path(table["state_dir"])).put("f", "TOKEN", "sealed")
    async with make_site(functions=table) as site:

        async def ask(what: str) -> Any:
            answer = await call(site.app, f"/fn/f/{what}")
            assert answer.status == 200, answer.body
            return answer

        assert (await ask("values")).json == ["hello", 3, "sealed", "hello"]
        assert (await ask("kv")).json == ["v", 1, ["k"], None]
        number, message = (await ask("d1")).json
        assert number == 7
        assert "no such table" in message, message
        assert (await ask("r2")).body == b"x" * 400_000
        events = (await ask("ai")).events
        assert events[-1] == "[DONE]"
        assert "".join(event.get("response") or "" for event in events[:-1])
        assert (await ask("ai_error")).json == [5007, 400]
        assert (await ask("other")).json == ["other at http://other/path", 3]
        assert (await ask("responses")).json == [201, "3", 3, 200_000, 204, None, 15]
        assert (await ask("assets")).body == b"<p>page"
        assert (await ask("limit")).json == [True, True, False]
        await ask("send")
        for _ in range(200):
            if (await ask("job")).body == b"1":
                break
        else:
            pytest.fail("the queue's consumer never had the message")
        await site.is_idle()


async def test_a_client_that_leaves_a_functions_stream_cancels_the_engines_sequence(
    make_site: SiteMaker, tmp_path: Path
) -> None:
    async with make_site(functions=two_functions(tmp_path / "functions")) as site:
        site.engine.script = [*list(says("Hello"))[:2], asyncio.Event()]  # two tokens, then it waits forever
        exchange = start(site.app, "/fn/f/ai")
        await eventually(lambda: site.engine.open)
        assert site.engine.open
        exchange.disconnect()
        await site.is_idle()
        await exchange.done()


async def test_a_binding_that_is_not_offered_stops_the_start_with_its_name(
    make_site: SiteMaker, tmp_path: Path
) -> None:
    broken = MANIFEST.replace('directory = "public"', 'directory = "nowhere"')
    with pytest.raises(ManifestError, match="nowhere"):
        async with make_site(functions=two_functions(tmp_path / "functions", broken)):
            pass


def test_the_secrets_of_one_function_are_not_anothers(tmp_path: Path) -> None:
    store = SecretStore(tmp_path)
    store.put("f", "TOKEN", "sealed")
    assert store.values("g") == {}
    assert json.dumps(store.values("f")) == '{"TOKEN": "sealed"}'


ASSETS = """
name = "f"
main = "src/entry.py"
[assets]
directory = "public"
run_worker_first = ["/api/*", "!/api/docs*"]
"""
ASKED = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response("asked " + request.url.partition("//")[2].partition("/")[2])
"""


async def test_a_file_is_answered_without_the_function_unless_the_manifest_says_otherwise(
    make_site: SiteMaker, tmp_path: Path
) -> None:
    table = two_functions(tmp_path / "functions", ASSETS)
    public = tmp_path / "functions/f/public"
    (tmp_path / "functions/f/src/entry.py").write_text(ASKED)
    (public / "api").mkdir()
    for name in ("index.html", "api/page.html", "api/docs.html"):
        (public / name).write_text(f"<p>{name}")
    async with make_site(functions=table) as site:
        for path, expected in {
            "": b"<p>index.html", "page": b"<p>page", "api/page": b"asked api/page", "api/docs": b"<p>api/docs.html", "none": b"asked none",
        }.items():  # fmt: skip
            assert (await call(site.app, f"/fn/f/{path}")).body == expected
        moved = await call(site.app, "/fn/f/page.html")
        assert (moved.status, moved.headers["location"]) == (307, "/fn/f/page")
        assert (await call(site.app, "/fn/f/page", method="POST")).body == b"asked page"
        await site.is_idle()
