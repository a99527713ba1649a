"""A site, the lender, computes prompts for another: answers are the same, even if the lender or the link fails. A prompt is not lent over a slow link
or against a data rule, and the route header states the reason.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from pilotlight.wire.hop.data_sites import DATA_SITES
from pilotlight.wire.hop.headers import HOP, HOP_SECRET_ENV, REQUEST_ID, Hop, sign_hop
from tests.e2e.test_prefill_decode import CHAT, SAMPLED, Split, Streams, prompt
from tests.e2e.throttled_proxy import ThrottledProxy
from tests.runtime.test_real_engine import Process
from tests.waiting import until

SECRET = "a secret of this test's network"
LENDER = f"lender{os.getpid()}"  # a unique name, so that no other site shares its host memory
MBIT = 125_000.0
WAYS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED}


def write_site(directory: Path, name: str, engine: str) -> Path:
    file = directory / f"{name}.toml"
    file.write_text(
        f'name = "{name}"\nplace = {{city = "A", latitude = 0.0, longitude = 0.0}}\n[listen]\nport = 0\n'
        "[engine]\nkv_gib = 0.1\nkv_host_gib = 0.1\nstandby = false\nweights_host_gib = 0.0\nthreads = 1\n"
        f"step_deadline_s = 5.0\nmax_num_batched_tokens = 128\n{engine}"
        '[[models]]\nname = "ember"\nsource = "embedded:ember"\n[limits]\ncontinue_within_s = 60\n'
    )
    return file


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


class Borrower(Split):
    """The site that borrows; it gets requests that are signed as by a router."""

    def __init__(self, process: Process, name: str) -> None:
        super().__init__(process)
        self.name = name
        self.data_sites: str | None = "*"

    def ask(self, prompt: str, key: str = "", **more: Any) -> tuple[str, dict[str, Any], str]:
        """Send a prompt; return the text, the usage and the route header.

        `key` is an API key; a new one makes a new tenant, for which no prompt is cached.
        """
        body = json.dumps(
            {
                "model": "ember", "messages": [{"role": "user", "content": prompt}], "max_tokens": 24,
                "temperature": 0, "ignore_eos": True,
            }
            | more
        ).encode()  # fmt: skip
        request_id = os.urandom(8).hex()
        headers = {
            "content-type": "application/json",
            REQUEST_ID: request_id,
            HOP: sign_hop(SECRET, time.time(), Hop("POST", CHAT, request_id, self.name), body),
        }
        if key:
            headers["authorization"] = f"Bearer {key}"
        if self.data_sites is not None:
            headers[DATA_SITES] = self.data_sites
        answer = httpx.post(self.url + CHAT, content=body, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        return text, answer.json()["usage"], answer.headers.get("x-pilotlight-route", "")

    def lender(self) -> dict[str, Any]:
        (status,) = self.status()["lenders"]
        found: dict[str, Any] = status
        return found


class Network:
    """A borrower, and a lender that it reaches through a throttled proxy."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lend_port = free_port()
        self.lender = self.start_lender()
        http_port = int(self.lender.url.rpartition(":")[2])
        self.way = ThrottledProxy({0: http_port, self.lend_port: self.lend_port})
        name = f"borrower{os.getpid()}"
        lenders = f'[[engine.lenders]]\nsite = "{LENDER}"\nurl = "http://{ThrottledProxy.HOST}:{self.way.port}"\n'
        file = write_site(directory, name, lenders)
        self.borrower = Borrower(Process(file, directory / "borrower.log", **{HOP_SECRET_ENV: SECRET}), name)
        until(lambda: self.is_usable, "the lender is known")

    @property
    def is_usable(self) -> bool:
        lender = self.borrower.lender()
        return not lender["why_not"] and lender["mbit_per_s"] > 0

    def start_lender(self) -> Process:
        file = write_site(self.directory, LENDER, f'lend_at = "127.0.0.1:{self.lend_port}"\n')
        return Process(file, self.directory / "lender.log", **{HOP_SECRET_ENV: SECRET})

    def lent(self, outcome: str = "computed") -> float:
        text = httpx.get(self.lender.url + "/metrics", timeout=30).text
        start = f'pilotlight_prompts_lent_total{{model_name="ember",outcome="{outcome}"}}'
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(start))

    def close(self) -> None:
        for process in (self.borrower.process, self.lender):
            process.popen.kill()
            process.popen.wait()
        self.way.close()


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    made = Network(tmp_path_factory.mktemp("lending"))
    yield made
    made.close()


def assert_nothing_is_open(network: Network) -> None:
    for process in (network.borrower.process, network.lender):
        site = Split(process)
        for name in (
            "pilotlight_inflight_requests",
            "vllm:num_requests_running{",
            "vllm:num_requests_waiting{",
            "pilotlight_kv_pinned_blocks{",
        ):
            until(lambda site=site, name=name: site.metric(name) == 0, f"{name} is zero")  # type: ignore[misc]


def test_a_busy_site_borrows_and_texts_stay_the_same(network: Network) -> None:
    site = network.borrower
    expected = {}
    for i in range(3):
        for name, more in WAYS.items():
            expected[i, name], _, route = site.ask(prompt(i), key=f"{i}{name}", **more)
            assert route.startswith("prompt=here; here="), route
            assert f"; {LENDER}=" in route, route
    assert network.lent() == 0, "an idle site computes its own prompts"
    with Streams(site):
        for (i, name), text in expected.items():  # as new tenants, so that nothing is cached here
            said, usage, _ = site.ask(prompt(i), key=f"busy{i}{name}", **WAYS[name])
            assert said == text
            assert usage["completion_tokens"] == 24
        for i in range(50):  # the lender is sometimes busy with a prompt of the streams
            _, usage, route = site.ask(prompt(70 + i))
            if route.startswith(f"prompt={LENDER}; here="):
                break
        assert route.startswith(f"prompt={LENDER}; here="), route
        assert " Mbit/s)" in route
        assert usage["prompt_tokens_details"]["cached_tokens"] < 64, (
            "the prompt must be computed for this request, at the lender"
        )
    assert network.lent() >= 1
    assert site.metric("pilotlight_kv_peer_hits_total") > 100
    assert site.metric('pilotlight_prompts_placed_total{model_name="ember",where="borrowed"}') >= 1
    assert site.lender()["borrowed"] >= 1
    assert_nothing_is_open(network)


@pytest.mark.parametrize("data_sites", [None, "", "elsewhere,others"])
def test_data_that_may_not_go_there_does_not(network: Network, data_sites: str | None) -> None:
    site, before = network.borrower, network.lent("computed") + network.lent("declined")
    until(lambda: network.is_usable, "the lender is known")
    with Streams(site):
        site.data_sites = data_sites
        try:
            for i in range(3):
                _, _, route = site.ask(prompt(1000 + i), key=f"bound{data_sites}")
                assert route.startswith("prompt=here; "), route
                assert route.endswith(f"; {LENDER}=no (data may not go there)"), route
        finally:
            site.data_sites = "*"
    # the prompts of the other streams are too short to be lent
    assert network.lent("computed") + network.lent("declined") == before


@pytest.mark.slow  # the borrower waits ten seconds after a failed attempt
def test_a_way_that_becomes_slow_is_priced_out(network: Network) -> None:
    site, way = network.borrower, network.way
    expected = [site.ask(prompt(2000 + i))[0] for i in range(3)]
    with Streams(site):
        way.bytes_per_s = 2 * MBIT
        try:
            for i, text in enumerate(expected):
                assert site.ask(prompt(2000 + i), key=f"slow{i}")[0] == text
            until(lambda: 0 < site.lender()["mbit_per_s"] < 8, "the rate of the link has been measured")
            routes = [""]

            def is_priced() -> bool:
                routes.append(site.ask(prompt(2100 + len(routes)))[2])
                return " Mbit/s)" in routes[-1]

            until(is_priced, "the borrower asks the lender for its price again")
        finally:
            way.bytes_per_s = float("inf")
    assert routes[-1].startswith("prompt=here; here="), routes
    assert float(routes[-1].partition(" at ")[2].partition(" Mbit/s")[0]) < 8
    assert_nothing_is_open(network)


def test_neither_the_lenders_death_nor_a_cut_way_costs_a_token(network: Network) -> None:
    site, way = network.borrower, network.way
    expected = [site.ask(prompt(3000 + i))[0] for i in range(8)]
    until(lambda: network.is_usable, "the lender is known", 30)

    def asked(number: int) -> str:
        return site.ask(prompt(3000 + number), key=f"d{number}")[0]

    with Streams(site), ThreadPoolExecutor(4) as pool:
        borrowed = site.lender()["borrowed"]
        answers = [pool.submit(asked, i) for i in range(4)]
        until(lambda: site.lender()["borrowed"] > borrowed or all(a.done() for a in answers), "one is borrowed")
        way.is_cut = True
        assert [answer.result(120) for answer in answers] == expected[:4]
        way.is_cut = False
        until(lambda: network.is_usable, "the way is open again", 60)
        answers = [pool.submit(asked, i) for i in range(4, 8)]
        time.sleep(0.1)
        for process in [psutil.Process(network.lender.popen.pid), *psutil.Process(network.lender.popen.pid).children()]:
            process.send_signal(signal.SIGKILL)
        assert [answer.result(120) for answer in answers] == expected[4:]
    network.lender.popen.wait()
    until(lambda: site.lender()["why_not"] != "", "its death is known")
    for name in ("pilotlight_inflight_requests", "vllm:num_requests_running{", "pilotlight_kv_pinned_blocks{"):
        until(lambda name=name: site.metric(name) == 0, f"{name} is zero")  # type: ignore[misc]
