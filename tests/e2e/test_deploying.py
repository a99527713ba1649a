"""Deploying across processes with signed hops: the command line, two sites, and a router, which is killed on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from load_tests.local_network import free_ports
from tests.e2e.one_site import NETWORK, PLACE

FURTHER = """
[[sites]]
name = "iad1"
url = "http://127.0.0.1:{further}"
{place}
"""
SITE = """
name = "{name}"
{place}
listen = {{ port = {port}, require_hop = true }}
engine = {{ standby = false, weights_host_gib = 0.0 }}
[[models]]
name = "{model}"
source = "embedded:ember"
[functions]
deployments = "http://127.0.0.1:{router}"
state_dir = "{folder}/{name}"
"""
ENTRY = """
from workers import DurableObject, Response, WorkerEntrypoint

class Counter(DurableObject):
    async def count(self):
        value = (await self.ctx.storage.get("n") or 0) + 1
        await self.ctx.storage.put("n", value)
        return value

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        print("VERSION was asked by", request.headers.get("cf-connecting-ip"))
        if "broken" in "VERSION":
            raise ValueError("this version is broken")
        if "/ask" in request.url:
            inputs = {"prompt": "What is the airport code of Lisbon?", "max_tokens": 8}
            here = await self.env.AI.run("ember", inputs)
            there = await self.env.AI.run("coal", inputs)
            stream = await self.env.AI.run("coal", {**inputs, "stream": True})
            return Response.json([here.response == there.response, "[DONE]" in await stream.text()])
        if "/count" not in request.url:
            return Response("VERSION")
        return Response(f"VERSION {await self.env.COUNTER.getByName('one').count()}")
"""
MANIFEST = """
name = "greeter"
main = "entry.py"
[[durable_objects.bindings]]
name = "COUNTER"
class_name = "Counter"
[ai]
binding = "AI"
"""


class Processes:
    """Two sites and their router as processes that a test can kill and start again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = dict(zip(("site", "further", "router"), free_ports(3), strict=True))
        self.url = f"http://127.0.0.1:{self.ports['router']}"
        self.env = {
            **os.environ,
            "PILOTLIGHT_DEPLOY_TOKEN": "a-token-of-sixteen-bytes-or-more",
            "PILOTLIGHT_HOP_SECRET": "a secret of sixteen bytes or more",
            "PILOTLIGHT_ROUTER_STATE": str(folder / "router"),
            "PILOTLIGHT_URL": self.url,
        }
        names: dict[str, Any] = {**self.ports, "place": PLACE, "folder": folder}
        for role, name, model in (("site", "ams1", "ember"), ("further", "iad1", "coal")):
            (folder / f"{role}.toml").write_text(SITE.format(**names, name=name, model=model, port=self.ports[role]))
        (folder / "network.toml").write_text((NETWORK + FURTHER).format(**names))
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str) -> None:
        module, file = (
            ("pilotlight.edge_router", "network.toml") if role == "router" else ("pilotlight.runtime", f"{role}.toml")
        )
        log = (self.folder / f"{role}.log").open("ab")
        command = [sys.executable, "-m", module, str(self.folder / file)]
        self.running[role] = subprocess.Popen(command, env=self.env, stdout=log, stderr=log)
        log.close()

    def is_ready(self) -> bool:
        try:
            sites = httpx.get(f"{self.url}/status", timeout=30).json()["sites"]
        except httpx.TransportError:
            return False
        return all(site["state"] == "healthy" for site in sites)

    def kill(self, role: str) -> None:
        process = self.running.pop(role)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(60)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60, check=False)

    def deploy(self, version: str, *options: str, manifest: str = MANIFEST) -> subprocess.CompletedProcess[str]:
        folder = self.folder / "greeter"
        folder.mkdir(exist_ok=True)
        (folder / "entry.py").write_text(ENTRY.replace("VERSION", version))
        (folder / "wrangler.toml").write_text(manifest)
        return self.command("deploy", str(folder), *options)

    def ask(self, path: str = "", session: str = "", prefer: str = "", name: str = "greeter") -> str:
        headers = {"x-session-affinity": session} if session else {}
        if prefer:
            headers["prefer"] = f"site={prefer}"
        return httpx.get(f"{self.url}/fn/{name}{path}", headers=headers, timeout=90).text


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    made = Processes(tmp_path_factory.mktemp("deploying"))
    for role in ("site", "further", "router"):
        made.start(role)
    try:
        until(made.is_ready, "the network is ready", 90)
        yield made
    finally:
        made.stop()


def until(condition: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    ends_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < ends_at, f"it never came true that {what}"
        time.sleep(0.05)


def test_a_function_lives_through_its_versions_and_its_routers_death(processes: Processes) -> None:
    assert "greeter: runs at ams1 only, because its data is there" in processes.deploy("one").stdout
    assert processes.ask() == "one"  # at once
    assert [processes.ask("/count") for _ in range(2)] == ["one 1", "one 2"]

    refused = processes.deploy("broken")
    assert refused.returncode == 1
    assert "this version is broken" in refused.stderr
    assert processes.ask("/count") == "one 3"

    processes.kill("router")
    processes.start("router")
    until(processes.is_ready, "the router is back")
    assert processes.deploy("two", "--percent", "40", "-m", "the second").returncode == 0
    answers = {session: processes.ask("", session) for session in map(str, range(30))}
    assert set(answers.values()) == {"one", "two"}
    assert {session: processes.ask("", session) for session in answers} == answers  # each session keeps its version
    assert processes.ask("/count").split()[1] == "4"  # both versions share the state

    listed = processes.command("versions", "greeter")
    assert "the second" in listed.stdout, listed
    assert "No function named greter has been deployed" in processes.command("versions", "greter").stderr
    assert "--health ready is not a path" in processes.deploy("one", "--health", "ready").stderr
    assert processes.command("rollback", "greeter").returncode == 0
    assert {processes.ask("", session) for session in answers} == {"one"}

    deleted = processes.command("delete", "greeter")
    assert "`pilotlight rollback greeter --version 2` brings it back" in deleted.stdout, deleted
    assert "no function named 'greeter'" in processes.ask("/count")
    assert "is deployed" in processes.command("delete", "greeter").stderr
    assert processes.command("rollback", "greeter", "--version", "1").returncode == 0
    assert processes.ask("/count") == "one 5"


def test_what_keeps_data_is_asked_at_its_home_alone_and_the_rest_everywhere(processes: Processes) -> None:
    plain = MANIFEST.partition("[[")[0].replace("greeter", "plain")
    assert "alone" not in processes.deploy("plain", manifest=plain).stdout
    for place in ("ams1", "iad1"):
        assert processes.ask(prefer=place, name="plain") == "plain"
    assert processes.deploy("kept").returncode == 0
    assert json.loads(processes.ask("/ask")) == [True, True], (
        "requests for a model that the function's site lacks go to the other site"
    )
    before = int(processes.ask("/count", prefer="ams1").split()[1])
    assert [processes.ask("/count", prefer=place) for place in ("iad1", "ams1", "iad1")] == [
        f"kept {before + more}" for more in (1, 2, 3)
    ]
    processes.kill("site")
    until(lambda: "cannot connect" in processes.ask("/count"), "its home is known to be away")
    assert processes.ask(name="plain") == "plain"
    processes.start("site")
    until(lambda: processes.ask("/count") == f"kept {before + 4}", "it continues where it was", 90)
    until(processes.is_ready, "its home is known to be back")


def test_what_it_prints_is_followed_from_afar(processes: Processes) -> None:
    assert processes.deploy("chatty").returncode == 0
    command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", "tail", "greeter"]
    printed = processes.folder / "tail.log"
    with printed.open("w") as file:
        following = subprocess.Popen(command, env=processes.env, stdout=file)
    try:
        until(lambda: "chatty was asked by 127.0.0.1" in (processes.ask() and printed.read_text()), "the line is there")
        assert printed.read_text().startswith("ams1  ")
    finally:
        following.terminate()
        following.wait(60)


def test_without_the_token_nothing_is_deployed(processes: Processes) -> None:
    token = processes.env.pop("PILOTLIGHT_DEPLOY_TOKEN")
    try:
        assert "in PILOTLIGHT_DEPLOY_TOKEN the token" in processes.deploy("three").stderr
        processes.env["PILOTLIGHT_DEPLOY_TOKEN"] = "guessed"
        assert "the deploy token is wrong" in processes.deploy("three").stderr
    finally:
        processes.env["PILOTLIGHT_DEPLOY_TOKEN"] = token
