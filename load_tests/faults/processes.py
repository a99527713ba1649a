"""Fault rows: processes that are killed, frozen or ended."""

import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

import orjson
import psutil

from load_tests.faults.members import ROUTER, Differently
from load_tests.faults.rows import PAUSE_S, Row, Strike


def rows() -> list[Row]:
    return [
        Row("kill a site and its engine", lambda it: kill_site(it, it.busiest())),
        Row("kill every engine and standby", kill_every_engine),
        Row("kill a site, 0.8 s later all other engines", kill_site_then_engines, before=until_standbys),
        Row("kill the same engine three times in 2 s", kill_thrice, before=until_standbys),
        Row("freeze an engine for 20 s", lambda it: frozen(it, [engine(it, it.busiest())], 20)),
        Row("freeze all engines for 20 s", freeze_all_engines, _each_site(_deadline(3)), before=until_standbys, pause_s=10, pause_beside_s=20),
        Row("kill a standby", kill_standby, before=until_standbys),
        Row("freeze a runtime for 20 s", lambda it: frozen(it, [it.network.members[it.busiest()].process.pid], 20)),
        Row("freeze the router for 12 s", freeze_router, pause_s=12 + PAUSE_S),
        Row("rolling restart of three sites", rolling_restart),
        Row("SIGTERM twenty times to all sites at once", end_all_sites, pause_s=2 * PAUSE_S),
        Row("kill the router", kill_router, may_be_cut=True),
        Row("SIGTERM three times to the router", end_router, may_be_cut=True),
        Row("kill one of the router's workers", kill_worker, may_be_cut=True, needs_workers=True),
    ]  # fmt: skip


def _deadline(seconds: float) -> Callable[[str], str]:
    """Return an edit of a site's file that sets the deadline of steps.

    Steps are short, because at least ten times the largest one is allowed.
    """

    def edited(text: str) -> str:
        short = re.sub(r"max_num_batched_tokens = \d+", "max_num_batched_tokens = 128", text)
        return short.replace("[engine]", f"[engine]\nstep_deadline_s = {seconds:g}")

    return edited


def _each_site(edit: Callable[[str], str]) -> dict[str, Differently]:
    return {name: Differently(edit=edit) for name in ("ams1", "iad1", "sin1")}


def until_standbys(it: Strike) -> None:
    """Wait until each site has a standby engine host, which starts a few seconds after the site."""

    def roles(site: str) -> set[str]:
        return {process.role for process in it.network.site_status(site).processes}

    _until(lambda: all("standby" in roles(site) for site in it.network.site_urls), 90, "every site has a standby")


def engine(it: Strike, site: str) -> int:
    return it.network.pid(site, "engine")


def kill_site(it: Strike, site: str) -> None:
    host = engine(it, site)
    it.network.members[site].process.kill()
    _kill(host)


def kill_and_await(it: Strike, sites: Iterable[str]) -> None:
    """Kill sites; return when they have started again and the router finds them healthy."""
    starts = {site: it.network.members[site].starts for site in sites}

    def is_back(site: str) -> bool:
        return it.network.members[site].starts > starts[site] and _is_ready(it.network.site_urls[site])

    for site in starts:
        kill_site(it, site)
    _until(lambda: all(map(is_back, starts)), 90, "the killed sites are ready again")
    it.network.wait_until_up(list(starts))


def kill_every_engine(it: Strike) -> None:
    hosts = [
        process.pid
        for site in it.network.site_urls
        for process in it.network.site_status(site).processes
        if process.role in ("engine", "standby")
    ]
    it.notes["killed"] = len(hosts)
    for pid in hosts:
        _kill(pid)


def kill_site_then_engines(it: Strike) -> None:
    first = it.busiest()
    others = [engine(it, site) for site in it.network.site_urls if site != first]
    kill_site(it, first)
    time.sleep(0.8)
    for pid in others:
        _kill(pid)


def kill_thrice(it: Strike) -> None:
    site, killed = it.busiest(), set[int]()
    for _ in range(3):
        until = time.monotonic() + 5
        while time.monotonic() < until:
            pids = {process.pid for process in it.network.site_status(site).processes if process.role == "engine"}
            if fresh := pids - killed:
                killed |= fresh
                for pid in fresh:
                    _kill(pid)
                break
            time.sleep(0.02)
        time.sleep(0.5)
    it.notes["killed"] = len(killed)


def frozen(it: Strike, pids: list[int], seconds: float) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGCONT)


def freeze_all_engines(it: Strike) -> None:
    frozen(it, [engine(it, site) for site in it.network.site_urls], 20)


def kill_standby(it: Strike) -> None:
    site = it.busiest()
    standbys = [process.pid for process in it.network.site_status(site).processes if process.role == "standby"]
    it.notes["killed"] = len(standbys)
    for pid in standbys:
        _kill(pid)


def freeze_router(it: Strike) -> None:
    frozen(it, [it.network.members[ROUTER].process.pid, *(worker.pid for worker in workers(it))], 12)


def rolling_restart(it: Strike) -> None:
    for site in it.network.site_urls:
        member = it.network.members[site]
        starts = member.starts
        member.process.send_signal(signal.SIGTERM)
        _until(lambda member=member, starts=starts: member.starts > starts, 60, f"{site} is started again")  # type: ignore[misc]
        it.network.wait_until_up()


def end_all_sites(it: Strike) -> None:
    def end(site: str) -> None:
        process = it.network.members[site].process
        for _ in range(20):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            time.sleep(0.01)

    threads = [threading.Thread(target=end, args=(site,)) for site in it.network.site_urls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def workers(it: Strike) -> list[psutil.Process]:
    """Return the router's workers; none if it is one process."""
    return list(psutil.Process(it.network.members[ROUTER].process.pid).children())


def kill_worker(it: Strike) -> None:
    """Kill the worker with the most streams. No other stream may end with an error."""
    port = urlsplit(it.network.url).port

    def num_streams(worker: psutil.Process) -> int:
        return len([each for each in worker.net_connections("tcp") if each.raddr and each.laddr.port == port])

    fullest = max(workers(it), key=num_streams)
    streams = num_streams(fullest)
    fullest.kill()
    _until(lambda: _answers(it), 30, "the router answers again")
    ended = sum(mine.error is not None for mine in it.heard)
    it.notes |= {"streams_of_the_killed": streams, "ended": ended}
    if ended > streams:
        raise RuntimeError(f"{ended} streams have ended with an error, but the killed worker had {streams}")


def kill_router(it: Strike) -> None:
    it.network.members[ROUTER].process.kill()
    began = time.monotonic()
    _until(lambda: _answers(it), 30, "the router answers again")
    it.notes["answers_again_after_s"] = round(time.monotonic() - began, 1)


def end_router(it: Strike) -> None:
    for _ in range(3):
        it.network.members[ROUTER].process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    _until(lambda: it.network.members[ROUTER].starts > 1, 60, "the router is started again")
    silent = [mine for mine in it.heard if not mine.is_done and mine.error is None]
    it.notes["without_a_named_error"] = len(silent)


def _answers(it: Strike) -> bool:
    body = orjson.dumps({"model": "ember", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]})
    request = urllib.request.Request(
        f"{it.network.url}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _is_ready(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/readyz", timeout=5).close()
    except OSError:
        return False
    return True


def _until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def _kill(pid: int) -> None:
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGKILL)
