"""What a network does when its parts die: the client of a killed site waits, and no process outlives its parent."""

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

from load_tests.local_network import LocalNetwork
from tests.e2e.conftest import NO_STANDBY, is_running, tree_of

Wait = Callable[[Callable[[], bool], str], None]


def ask(network: LocalNetwork, session: str) -> tuple[str, str]:
    """Returns the answering site and the answer."""
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
    runtime.suspend()  # the request reaches the site and gets no byte out of it
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, network, "session-1")
        time.sleep(0.3)
        assert not waiting.done()
        runtime.kill()
        survivor, answer = waiting.result(30)
    assert survivor != home
    assert answer == undisturbed
    eventually(lambda: ready_again(network, home, runtime.pid), f"{home} is started again")


def ready_again(network: LocalNetwork, site: str, killed_pid: int) -> bool:
    try:
        status = network.site_status(site)
    except OSError:
        return False
    return status.ready and network.pid(site) != killed_pid


def test_a_killed_engine_is_replaced_and_its_site_answers_again(network: LocalNetwork, eventually: Wait) -> None:
    site = next(iter(network.site_urls))
    engine = network.pid(site, "engine")
    psutil.Process(engine).kill()

    def has_another() -> bool:
        status = network.site_status(site)  # one look: between two the site may notice that its engine is gone
        return status.ready and any(p.role == "engine" and p.pid != engine for p in status.processes)

    eventually(has_another, "a new engine is ready")
    assert "LIS" in ask(network, "session-2")[1]


def test_a_stream_through_the_router_outlives_the_engine_behind_it(network: LocalNetwork, eventually: Wait) -> None:
    body = {
        "model": "ember", "temperature": 0.9, "seed": 5, "max_tokens": 250, "ignore_eos": True, "stream": True,
        "messages": [{"role": "user", "content": "Tell me a story."}],
    }  # fmt: skip

    def told(kill: bool) -> tuple[str, str]:
        """The text, and the last event."""
        headers = {"content-type": "application/json", "x-session-affinity": "session-3"}
        request = urllib.request.Request(f"{network.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        text, last = "", ""
        with urllib.request.urlopen(request, timeout=60) as answer:
            for line in answer:
                if not line.startswith(b"data: "):
                    continue
                last = line.decode().removeprefix("data: ").strip()
                event = {} if last == "[DONE]" else json.loads(last)
                text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
                if kill and len(text) > 20:
                    psutil.Process(network.pid(answer.headers["x-pilotlight-site"], "engine")).kill()
                    kill = False
        return text, last

    undisturbed, _ = told(kill=False)
    text, last = told(kill=True)
    if last == "[DONE]":
        assert text == undisturbed
    else:  # on a machine too busy to start an engine in time
        assert "could not be continued" in json.loads(last)["error"]["message"]
        assert undisturbed.startswith(text)
    eventually(lambda: all(network.site_status(name).ready for name in network.site_urls), "every engine is back")


def test_ctrl_c_ends_every_process(eventually: Wait) -> None:
    with LocalNetwork(num_sites=2) as running:
        processes = tree_of(running.process.pid)
        assert len(processes) >= 6  # up, router, two sites, two engines
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(30) == 0
    eventually(lambda: not any(map(is_running, processes)), "every process has ended")


def test_no_process_outlives_a_killed_parent(eventually: Wait) -> None:
    with LocalNetwork(num_sites=1, engine_settings=NO_STANDBY) as running:
        processes = tree_of(running.process.pid)
        running.process.kill()
        eventually(lambda: not any(map(is_running, processes)), "every process has ended")


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runtime.cli.app", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_port_in_use_is_one_sentence_with_its_remedy(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments in (["up", "--port", str(port)], ["serve", "embedded:ember", "--port", str(port)]):
            done = run_cli(*arguments)
            assert done.returncode == 1
            assert f"Port {port} on 127.0.0.1 cannot be used" in done.stderr
            assert "--port" in done.stderr


def test_a_misspelt_key_stops_the_start_and_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('nmae = "x"\n')
    for command in ("site", "router"):
        done = run_cli(command, str(file))
        assert done.returncode == 1
        assert "unknown key 'nmae'" in done.stderr
        assert "Traceback" not in done.stderr
