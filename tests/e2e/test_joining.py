"""A second machine joins a network with one command. Two network namespaces act as machines that share only that command line; every connection uses
TLS."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CHAT = {"model": "ember", "messages": [{"role": "user", "content": "What is the airport code of Lisbon?"}]}
ASK = """
import json, ssl, sys, urllib.request
url, key, authority, body = sys.argv[1:]
request = urllib.request.Request(url, body.encode(), {"authorization": "Bearer " + key, "content-type": "application/json"})
with urllib.request.urlopen(request, timeout=60, context=ssl.create_default_context(cafile=authority)) as answer:
    print(answer.headers["x-pilotlight-site"], answer.read().decode())
"""
ANSWERS_WITHIN_S = 90

pytestmark = [
    pytest.mark.network,
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]


class Machine(NamedTuple):
    """A network namespace with its own home directory."""

    name: str
    address: str
    home: Path

    def command(self, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *arguments]

    def pilotlight(self, *arguments: str) -> list[str]:
        return self.command(sys.executable, "-m", "pilotlight.runtime.cli.commands", *arguments)

    @property
    def environment(self) -> dict[str, str]:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return {
            **os.environ,
            "HOME": str(self.home),
            "XDG_CACHE_HOME": cache,
            "XDG_STATE_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
        }

    def run(self, command: list[str]) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command,
            env=self.environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    @contextmanager
    def running(self, command: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
        with open(self.home / "log", "ab") as log:
            process = subprocess.Popen(
                command, env=self.environment, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)

    def log(self) -> str:
        return (self.home / "log").read_text()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    names = [f"pl{os.getpid()}{letter}" for letter in "ab"]
    found = tuple(Machine(name, f"10.77.0.{i}", tmp_path / name) for i, name in enumerate(names, 1))
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        lines = [f"netns add {names[1]}", f"link add {names[0]} type veth peer name {names[1]}"]
        for machine in found:
            machine.home.mkdir()
            lines += [
                f"link set {machine.name} netns {machine.name}",
                f"-n {machine.name} addr add {machine.address}/24 dev {machine.name}",
                f"-n {machine.name} link set {machine.name} up",
                f"-n {machine.name} link set lo up",
            ]
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True, capture_output=True)
        yield found[0], found[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def test_a_second_machine_answers_after_one_line_and_the_line_is_good_once(machines: tuple[Machine, Machine]) -> None:
    first, second = machines
    folder = first.home / "network"
    made = first.run(first.pilotlight("network", "init", str(folder), "--host", first.address, "--city", "Oslo"))
    assert made.returncode == 0, made.stderr
    key, line = made.stdout.split("\n")[0], made.stdout.strip().split("\n")[-1]
    url, token = line.split()[-2:]
    assert line.startswith(f"pilotlight join https://{first.address}:8443 pj-")

    def asked(authority: Path = folder / "authority.pem") -> "subprocess.CompletedProcess[str]":
        body = json.dumps(CHAT)
        return first.run(
            first.command(sys.executable, "-c", ASK, f"{url}/v1/chat/completions", key, str(authority), body)
        )

    def joins(token: str, name: str) -> str:
        options = "--dir", str(second.home / name), "--name", name, "--port", "8791", "--no-start"
        done = second.run(second.pilotlight("join", url, token, *options))
        assert done.returncode == 1
        assert not (second.home / name).exists()
        return done.stderr

    with first.running(first.pilotlight("router", str(folder / "network.toml"))):
        while "listening on" not in first.log():
            time.sleep(0.05)
        assert "not the network of this token" in joins(token.partition(".")[0] + "." + "0" * 64, "x")
        assert "not known here" in joins("pj-guessed." + token.partition(".")[2], "x")
        began = time.monotonic()
        join = second.pilotlight("join", url, token, "--dir", str(second.home / "site"), "--name", "osl2")
        with second.running(join):
            while (answer := asked()).returncode:
                assert time.monotonic() - began < ANSWERS_WITHIN_S, second.log()
            assert answer.stdout.startswith("osl2 ")
            assert "LIS" in answer.stdout
            assert "used by osl2" in joins(token, "y")
            assert "CERTIFICATE_VERIFY_FAILED" in asked(Path("/etc/ssl/certs/ca-certificates.crt")).stderr
            unsigned = first.run(
                first.command(sys.executable, "-c", ASK, f"https://{second.address}:8790/v1/chat/completions", key,
                              str(folder / "authority.pem"), json.dumps(CHAT))
            )  # fmt: skip
            assert "HTTP Error 403" in unsigned.stderr, "a site answers only requests that a router has signed"
            listed = first.run(first.pilotlight("network", "list", str(folder)))
            assert "osl2" in listed.stdout
            assert "used by osl2" in listed.stdout
            first.run(first.pilotlight("network", "remove", str(folder), "osl2"))
            assert (
                "osl2" not in first.run(first.pilotlight("network", "list", str(folder))).stdout.partition("token")[0]
            )
