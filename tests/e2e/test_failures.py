"""A network whose processes die: the client of a killed site only waits longer, and no process outlives its parent."""

import concurrent.futures
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from load_tests.local_network import LocalNetwork
from tests.e2e.conftest import NO_STANDBY, is_running, tree_of

pytestmark = pytest.mark.smoke

Wait = Callable[[Callable[[], bool], str], None]


def ask(network: LocalNetwork, session: str) -> tuple[str, str]:
    """Send a request in a session; return the name of the site that answers, and the answer."""
    body = {
        "model": "ember", "temperature": 0, "max_tokens": 30,
        "messages": [{"role": "user", "content": "What is the airport code of Lisbon?"}],
    }  # fmt: skip
    headers = {"content-type": "application/json", "x-session-affinity": session}
    request = urllib.request.Request(f"{network.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.headers["x-pilotlight-site"], json.loads(answer.read())["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as refused:
        raise AssertionError(f"{refused.code}: {refused.read().decode()}") from refused


def test_killing_a_site_before_its_first_byte_costs_the_client_only_time(
    network: LocalNetwork, eventually: Wait
) -> None:
    home, undisturbed = ask(network, "session-1")
    runtime = psutil.Process(network.pid(home))
    runtime.suspend()  # the site receives the request but sends no byte
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, network, "session-1")
        time.sleep(0.3)
        assert not waiting.done()
        runtime.kill()
        survivor, answer = waiting.result(60)
    assert survivor != home
    assert answer == undisturbed
    eventually(lambda: ready_again(network, home, runtime.pid), f"{home} is started again")


def ready_again(network: LocalNetwork, site: str, killed_pid: int) -> bool:
    try:
        status = network.site_status(site)
    except OSError:
        return False
    return status.ready and network.pid(site) != killed_pid


def test_ctrl_c_ends_every_process(eventually: Wait) -> None:
    with LocalNetwork(num_sites=2) as running:
        processes = tree_of(running.process.pid)
        assert len(processes) >= 6  # `pilotlight up`, a router, two sites, two engine hosts
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0
    eventually(lambda: not any(map(is_running, processes)), "every process has ended")


def test_no_process_outlives_a_killed_parent(eventually: Wait) -> None:
    with LocalNetwork(num_sites=1, engine_settings=NO_STANDBY) as running:
        processes = tree_of(running.process.pid)
        running.process.kill()
        eventually(lambda: not any(map(is_running, processes)), "every process has ended")


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_port_in_use_is_one_sentence_with_its_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments in (["up", "--port", str(port)], ["serve", "embedded:ember", "--port", str(port)]):
            done = run_cli(*arguments)
            assert done.returncode == 1
            assert f"port {port} on 127.0.0.1 is in use" in done.stderr
            assert "--port" in done.stderr
