"""`pilotlight deploy` end to end: the command, a router's deployments, a real site that fetches them, real isolates."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette

from pilotlight.edge_router.backends.published_status import PublishedStatus
from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.requests.function_hosts import FunctionHosts
from pilotlight.edge_router.services.deployments import TRY_TIMEOUT_S, DeployGuard, DeploymentApi
from pilotlight.edge_router.telemetry.status_routes import FAILURES
from pilotlight.functions.cli.deploy import delete_secret, deploy, put_secret, rollback, secret_names, tail, versions
from pilotlight.functions.cli.logs_command import logs
from pilotlight.functions.host.dependencies.layers import INSTALL_S
from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.wire.credentials import Access
from pilotlight.wire.hop.deployments import Tried
from pilotlight.wire.hop.headers import DEPLOY_TOKEN_ENV
from pilotlight.wire.hop.status import FunctionsStatus
from pilotlight.wire.http.listen import bind
from pilotlight.wire.http.server import Server
from tests.asgi import call, eventually
from tests.edge_router.builders import network as network_of
from tests.runtime.conftest import Site, SiteMaker

ENTRY = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        print("version VERSION answers")
        await self.env.KV.put("last", "VERSION")
        return Response("VERSION")
"""
MANIFEST = 'name = "greeter"\nmain = "entry.py"\n[[kv_namespaces]]\nbinding = "KV"\nid = "kept"\n'


async def started(site: Site) -> None:
    """Wait until the site follows its router's deployments."""
    served = site.app.functions.served
    await eventually(
        lambda: (
            served.deployed is not None
            and any(task.get_name() == "following deployments" for task in asyncio.all_tasks())
        )
    )


class Network:
    """One router's deployments and one site."""

    def __init__(self, site: Site, api: Api, folder: Path) -> None:
        self.site = site
        self.api = api
        self.folder = folder

    def write(self, version: str, source: str = ENTRY, manifest: str = MANIFEST) -> None:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "entry.py").write_text(source.replace("VERSION", version))
        (self.folder / "wrangler.toml").write_text(manifest)

    async def deploy(self, percent: float = 100.0, **options: Any) -> None:
        await asyncio.to_thread(deploy, self.api, self.folder, None, percent, "", "/", None, **options)

    async def ask(self, session: str = "", name: str = "greeter") -> Any:
        headers = {"x-session-affinity": session} if session else {}
        return await call(self.site.app, f"/fn/{name}", **headers)


@pytest.fixture
async def network(make_server: SiteMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Network]:
    monkeypatch.setenv(DEPLOY_TOKEN_ENV, "token")
    table = {"state_dir": str(tmp_path / "state"), "show_errors": True}
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with make_server(functions={**table, "deployments": url}) as site, router(site, listener, tmp_path):
        await started(site)
        yield Network(site, Api(url), tmp_path / "greeter")


@asynccontextmanager
async def router(site: Site, listener: socket.socket, tmp_path: Path) -> AsyncIterator[None]:
    backend = SimpleNamespace(
        name="ams1",
        url=site.url,
        state="healthy",
        status=SimpleNamespace(functions=FunctionsStatus(2, takes_deployed=True)),
        published=PublishedStatus(),
    )
    routes = DeploymentApi(
        {"ams1": backend},
        DeployGuard("token", "", Access([], is_required=False), SiteClocks(["ams1"])),
        SimpleNamespace(of=lambda *names: None),
        FunctionHosts(network_of({"ams1": site.url})),
        tmp_path / "router",
    ).routes()
    server = Server(Starlette(routes=routes, exception_handlers=FAILURES))
    await server.start(listener)
    try:
        yield
    finally:
        await server.stop()


async def test_a_version_is_deployed_replaced_and_rolled_back(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (await network.ask()).status == 404
    network.write("one")
    await network.deploy()
    assert (await network.ask()).body == b"one"
    network.write("two")
    await network.deploy()
    assert (await network.ask()).body == b"two"
    assert len(network.site.app.functions.served.functions.pools) == 1
    await asyncio.to_thread(rollback, network.api, "greeter", None)
    assert (await network.ask()).body == b"one"
    capsys.readouterr()
    await asyncio.to_thread(versions, network.api, "greeter", True)
    printed = json.loads(capsys.readouterr().out)
    assert [version["number"] for version in printed["versions"]] == [1, 2]
    assert printed["shares"] == [{"number": 1, "percent": 100.0}]
    await network.site.is_idle()


async def test_a_deployment_says_what_it_waits_for_while_it_waits(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    network.write("one")
    await network.deploy(progress_s=0.01)
    said = capsys.readouterr().out.splitlines()
    waiting = [line for line in said if line.startswith("greeter: its sites start it and call GET /")]
    assert (waiting[0], waiting[-1].endswith(" s so far")) == ("greeter: its sites start it and call GET /", True)
    assert "greeter: version 1 has 100 %" in said
    (network.folder / "requirements.txt").write_text("a==1\nb==1\nc==1\nd==1\n")

    class Accepting(Api):
        def send(self, *sent: Any) -> Any:
            return {"revision": 1, "versions": [], "shares": [], "name": "greeter"}

    network.api = Accepting(network.api.url)
    await network.deploy()
    assert "its sites install 4 packages (a==1, b==1, c==1, ...), start it" in capsys.readouterr().out


async def test_a_deployment_says_what_of_the_manifest_has_no_effect(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    network.write("one", manifest='kv_namespace = []\nbrowser = { binding = "B" }\n' + MANIFEST)
    await network.deploy()
    said = capsys.readouterr().out
    assert "  kv_namespace (did you mean kv_namespaces?) in the manifest has no effect here\n" in said
    assert "  B: browser is not offered here; it fails when it is used\n" in said
    other = await network.ask(name="other")
    assert other.status == 404
    assert other.json["error"]["message"] == "this site has no function named 'other'"


async def test_every_command_reports_a_name_that_was_never_deployed(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, further in ((rollback, None), (versions, False)):
        with pytest.raises(CliError, match="No function named missing has been deployed"):
            await asyncio.to_thread(command, network.api, "missing", further)

    class Following(Api):
        def follow(self, path: str, token: str) -> Iterator[Any]:
            return iter([{"site": "ams1", "line": "said"}])

    await asyncio.to_thread(tail, Following(network.api.url), "missing", False)
    told = capsys.readouterr()
    assert told.err.startswith("No function named missing has been deployed; ")
    assert told.out == "ams1  said\n"


async def test_a_site_that_cannot_serve_a_change_is_named(
    network: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = network.site.app.functions.served.deployed
    assert "has no revision 1" in (await site.served("greeter", 1)).detail
    network.write("one")
    monkeypatch.setattr(site, "served", lambda name, revision: asyncio.sleep(0, Tried(False, "it is busy")))
    await network.deploy()
    assert (
        "greeter: runs at ams1 only, because its data is there\ngreeter: not confirmed to be served by ams1 yet: it is busy\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(("home", "there"), [("iad1", "iad1"), ("", "every site")])
async def test_a_deployment_that_moves_a_function_says_that_its_data_stays(
    network: Network, capsys: pytest.CaptureFixture[str], home: str, there: str
) -> None:
    network.write("one")
    (network.folder / "requirements.txt").write_text("a==1\n")
    told = {"name": "greeter", "revision": 1, "versions": [], "shares": []}
    api: Any = SimpleNamespace(
        url="http://router",
        send=lambda method, *_: {**told, "home": "ams1" if method == "GET" else home},
    )
    await asyncio.to_thread(deploy, api, network.folder, None, 100.0, "", "/", home)
    said = capsys.readouterr().out
    moved = f"greeter: moved from ams1 to {there}; its data stays at ams1, and --home ams1 moves it back there\n"
    assert moved in said
    assert "because its data is there" not in said
    assert "its sites install 1 package (a==1), start it" in said


async def test_a_share_of_the_clients_gets_the_new_version_and_keeps_it(network: Network) -> None:
    network.write("one")
    await network.deploy()
    network.write("two")
    await network.deploy(percent=30)
    sessions = [f"client {n}" for n in range(60)]
    first = [(await network.ask(session)).body for session in sessions]
    again = [(await network.ask(session)).body for session in sessions]
    assert first == again
    assert 5 <= Counter(first)[b"two"] <= 35
    kept = Path(network.site.config.functions.state_dir or "") / "bindings/kv"
    assert [path.name for path in kept.iterdir()] == ["kept"]  # all versions share one state


async def test_a_version_that_does_not_start_takes_nothing_from_the_one_before(
    network: Network, tmp_path: Path
) -> None:
    network.write("one", manifest=MANIFEST + '[[queues.consumers]]\nqueue = "jobs"\n')
    await network.deploy()
    for source, sentence in (
        ("import nothing_like_this", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit"),
    ):
        network.write("two", source)
        with pytest.raises(CliError, match=sentence):
            await network.deploy()
    network.write("two", ENTRY.replace('return Response("VERSION")', 'raise ValueError("broken inside")'))
    with pytest.raises(CliError, match="broken inside"):
        await network.deploy()
    network.write("two", manifest=MANIFEST + "[vars]\nbad-name = 1\n")
    with pytest.raises(Exception, match="bad-name"):
        await network.deploy()
    assert (await network.ask()).body == b"one"
    assert network.site.app.functions.served.queue("jobs").consumer is not None


ANSWERS_500 = """
from workers import WorkerEntrypoint
import asgi

async def app(scope, receive, send):
    try:
        1 / 0
    except ZeroDivisionError:
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"Internal Server Error"})
        raise  # as frameworks do

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return await asgi.fetch(app, request, self.env)
"""


async def test_the_author_gets_the_traceback_of_a_version_that_answers_its_health_call_with_500(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    network.write("one")
    await network.deploy()
    network.write("two", ANSWERS_500)
    with pytest.raises(CliError, match=r"(?s)GET / answered 500; it printed:.*1 / 0.*ZeroDivisionError: division by"):
        await network.deploy()
    await asyncio.to_thread(
        logs, network.api, "greeter", since=None, grep="", status="error", limit=9, follow=False, as_json=False
    )
    assert "fetch GET / -> 500" in capsys.readouterr().out


async def test_a_refused_deployment_owns_nothing_and_anothers_resources_refuse_one(network: Network) -> None:
    broken = ENTRY.replace('return Response("VERSION")', 'raise ValueError("broken inside")')
    network.write("one", broken, MANIFEST.replace("greeter", "squatter"))
    with pytest.raises(CliError, match="broken inside"):
        await network.deploy()
    network.write("one")
    await network.deploy()
    assert (await network.ask()).body == b"one"
    network.write("one", manifest=MANIFEST.replace("greeter", "squatter"))
    with pytest.raises(CliError, match="squatter may not use kv:kept, which is the function greeter's"):
        await network.deploy()


async def test_stores_that_two_functions_leave_unnamed_are_two(network: Network) -> None:
    source = ENTRY.replace(
        "await self.env.KV.put", "before = await self.env.KV.get('last')\n        await self.env.KV.put"
    )
    source = source.replace('Response("VERSION")', "Response(str(before))")
    for name in ("greeter", "other"):
        network.write(name, source, MANIFEST.replace('id = "kept"\n', "").replace("greeter", name))
        await network.deploy()
    for name in ("greeter", "other"):
        assert [(await network.ask(name=name)).body.decode() for _ in range(2)][1] == name


async def test_of_two_versions_that_were_tried_with_one_store_the_first_that_is_accepted_owns_it(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = network.site.app.functions.served
    network.write("one", manifest=MANIFEST.replace("greeter", "squatter"))
    with monkeypatch.context() as late:
        late.setattr(served, "claim", lambda pool: None)  # both versions are accepted without a claim of the store
        await network.deploy()
        network.write("one")
        await network.deploy()
    served.deployed._accepted.clear()
    assert (await network.ask()).body == b"one"
    answer = await network.ask(name="squatter")
    assert (answer.status, "which is the function greeter's" in answer.json["error"]["message"]) == (500, True)
    assert [name.partition("@")[0] for name in served.functions.pools] == ["greeter"]


OBJECTS = """
from workers import DurableObject, Response, WorkerEntrypoint

class NAME(DurableObject):
    async def add(self):
        self.ctx.storage.kv.put("n", (self.ctx.storage.kv.get("n") or 0) + 1)
        return self.ctx.storage.kv.get("n")

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if "host: health" in str(dict(request.headers)) or request.url.startswith("http://health"):
            return Response("healthy")
        return Response(str(await self.env.ROOMS.getByName("one").add()))
"""
ROOMS = (
    'name = "greeter"\nmain = "entry.py"\n[[durable_objects.bindings]]\nname = "ROOMS"\nclass_name = "NAME"\n'
    '[[migrations]]\ntag = "v1"\nnew_sqlite_classes = ["Room"]\n'
)
RENAMES = '[[migrations]]\ntag = "v2"\nrenamed_classes = [{ from = "Room", to = "Lobby" }]\n'


async def test_a_class_of_objects_is_renamed_when_the_version_takes_the_traffic(network: Network) -> None:
    def write(name: str, more: str = "", comment: str = "") -> None:
        network.write("", OBJECTS.replace("NAME", name) + comment, ROOMS.replace("NAME", name) + more)

    write("Room")
    await network.deploy()
    assert [(await network.ask()).body for _ in range(2)] == [b"1", b"2"]
    write("Lobby", RENAMES)
    with pytest.raises(CliError, match="the migration v2 of version 2 of greeter renames or deletes classes"):
        await network.deploy(10.0)
    assert (await network.ask()).body == b"3"
    await network.deploy()
    assert (await network.ask()).body == b"4"
    with pytest.raises(
        CliError, match=r"nothing was changed: .* the class Room was renamed to Lobby by the migration v2"
    ):
        await asyncio.to_thread(rollback, network.api, "greeter", 1)
    assert (await network.ask()).body == b"5"
    write("Room", "", "# once more\n")
    with pytest.raises(CliError, match="the class Room was renamed to Lobby by the migration v2"):
        await network.deploy()
    assert (await network.ask()).body == b"6"
    write("Lobby", RENAMES, "# a gradual one, whose migrations are done\n")
    await network.deploy(50.0)
    assert (await network.ask()).body == b"7"


async def test_a_version_that_cannot_be_fetched_leaves_its_clients_to_the_one_before(
    network: Network, tmp_path: Path
) -> None:
    network.write("one")
    await network.deploy()
    served = network.site.app.functions.served
    before = {*served.functions.pools}, {*(tmp_path / "router/bundles").glob("*.tar")}
    network.write("two")
    await network.deploy(percent=40)
    (pool,) = {*served.functions.pools} - before[0]
    (bundle,) = {*(tmp_path / "router/bundles").glob("*.tar")} - before[1]
    served.functions.remove(pool)
    (Path(network.site.config.functions.state_dir or "") / "deployed" / bundle.stem).rename(tmp_path / "away")
    bundle.unlink()
    answers = [await network.ask(f"client {n}") for n in range(30)]
    assert {answer.body for answer in answers} == {b"one"}


async def test_what_a_function_prints_and_why_it_fails_can_be_followed(network: Network) -> None:
    network.write("one")
    await network.deploy()
    tails = network.site.app.functions.served.functions.tails
    token = {"authorization": "Bearer token"}
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{network.api.url}/deployments/greeter/tail", headers=token) as answer:
            await eventually(lambda: tails.is_followed("greeter"))
            await network.ask()
            async for line in answer.content:
                if line.startswith(b"data:"):
                    break
        event = json.loads(line.removeprefix(b"data:"))
        assert (event["site"], event["line"]) == ("ams1", "version one answers")
        async with session.get(f"{network.site.url}/internal/functions/tail/greeter") as refused:
            assert refused.status == 403
    await eventually(lambda: not tails.is_followed("greeter"))  # a follower that leaves is removed


async def test_the_log_of_a_function_is_read_through_the_router(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    network.write("one")
    await network.deploy()
    await network.ask()
    options: dict[str, Any] = {"since": "1h", "grep": "", "status": "ok", "limit": 10, "follow": False}

    async def read(**changed: Any) -> str:
        capsys.readouterr()
        await asyncio.to_thread(logs, network.api, "greeter", **{**options, "as_json": False, **changed})
        return capsys.readouterr().out

    printed = await read()
    assert printed.count("ams1  fetch GET / -> 200 ok") == 2, "one line is the health call's"
    assert "  version one answers\n" in printed
    (_, invocation) = [json.loads(line) for line in (await read(as_json=True)).splitlines()]
    assert (invocation["site"], len(invocation["version"])) == ("ams1", 16)
    assert await read(grep="nothing of this") == ""
    with pytest.raises(CliError, match="status"):
        await read(status="good")
    with pytest.raises(CliError, match="is not a time: give an age"):
        await read(since="yesterday")


async def test_a_followed_log_continues_with_new_lines(network: Network, capsys: pytest.CaptureFixture[str]) -> None:
    network.write("one")
    await network.deploy()
    rounds: list[int] = []

    def wait(seconds: float) -> None:
        rounds.append(len(rounds))
        if len(rounds) == 3:
            raise KeyboardInterrupt
        asyncio.run_coroutine_threadsafe(network.ask(), loop).result(10)

    loop = asyncio.get_running_loop()
    capsys.readouterr()
    asked: dict[str, Any] = {"since": None, "grep": "", "status": None, "limit": 10, "follow": True, "as_json": True}
    with pytest.raises(SystemExit):
        await asyncio.to_thread(logs, network.api, "greeter", **asked, sleep=wait)
    seen = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["what"] for each in seen] == ["GET /"] * 3, "the health call, and one request per round"
    assert [each["seq"] for each in seen] == sorted({each["seq"] for each in seen}), "each record once"


DATABASE = MANIFEST + '[[d1_databases]]\nbinding = "DB"\n'
READS_DATABASE = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        rows = await self.env.DB.prepare("SELECT text FROM notes ORDER BY id").all()
        return Response("VERSION " + " ".join(row["text"] for row in rows.results))
"""


async def test_a_deploy_applies_the_migrations_of_its_databases_before_its_health_call_and_refuses_them_whole(
    network: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = network.folder / "migrations"
    network.write("one", READS_DATABASE, DATABASE)
    folder.mkdir()
    (folder / "0001_notes.sql").write_text(
        "CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT); INSERT INTO notes (text) VALUES ('first');"
    )
    await network.deploy()
    assert (await network.ask()).body == b"one first"
    network.write("two", READS_DATABASE, DATABASE)
    (folder / "0002_more.sql").write_text("INSERT INTO notes (text) VALUES ('second');")
    (folder / "0003_bad.sql").write_text("INSERT INTO nowhere VALUES (1);")
    with pytest.raises(CliError, match=r"migrations were not applied: D1_ERROR: 0003_bad\.sql: no such table: nowhere"):
        await network.deploy()
    assert (await network.ask()).body == b"one first", "neither the second migration nor the version is applied"
    (folder / "0003_bad.sql").write_text("INSERT INTO notes (text) VALUES ('third');")
    await network.deploy()
    assert (await network.ask()).body == b"two first second third"


READS_SECRET = """
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(f"VERSION {self.env.TOKEN}" if "TOKEN" in self.env else "VERSION none")
"""


async def test_a_secret_that_is_put_through_the_router_reaches_the_first_version_and_a_running_one(
    network: Network, tmp_path: Path
) -> None:
    await asyncio.to_thread(put_secret, network.api, "greeter", "TOKEN", "first")
    assert b"first" not in (tmp_path / "router" / "secrets.json").read_bytes()
    network.write("one", READS_SECRET)
    await network.deploy()
    assert (await network.ask()).body == b"one first", "its health call had the secret, too"

    async def answers(expected: bytes) -> None:
        while (await network.ask()).body != expected:
            await asyncio.sleep(0.05)

    await asyncio.to_thread(put_secret, network.api, "greeter", "TOKEN", "second")
    await asyncio.wait_for(answers(b"one second"), 30)
    assert await asyncio.to_thread(secret_names, network.api, "greeter") == ["TOKEN"]
    await asyncio.to_thread(delete_secret, network.api, "greeter", "TOKEN")
    await asyncio.wait_for(answers(b"one none"), 30)
    with pytest.raises(CliError, match="has no secret 'TOKEN'"):
        await asyncio.to_thread(delete_secret, network.api, "greeter", "TOKEN")
    with pytest.raises(CliError, match="is not a name of a secret"):
        await asyncio.to_thread(put_secret, network.api, "greeter", "TO-KEN", "x")


def test_a_deployment_waits_for_as_long_as_a_site_may_install_packages() -> None:
    assert TRY_TIMEOUT_S > INSTALL_S + 30.0
