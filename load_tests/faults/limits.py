"""Fault rows: exhausted resources (descriptors, address space, memory, disks)."""

import os
import subprocess
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson

from load_tests.faults.links import can_filter
from load_tests.faults.members import ROUTER, Differently
from load_tests.faults.rows import Row, Strike

SITE = "ams1"
CGROUP = Path("/sys/fs/cgroup/memory")


def rows() -> list[Row]:
    others = ("iad1", "sin1")
    space = ("prlimit", f"--as={700 << 20}")
    found = [
        Row("64 descriptors at the router", crowd, _on(ROUTER, _files(64)), may_be_refused=True, streams=6),
        Row("64 descriptors at a site", crowd, _on(SITE, _files(64))),
        Row("40 descriptors at a site", crowd, _on(SITE, _files(40)), expected=others, ends_healthy=False),
        Row("700 MiB of address space at a site", nothing, _on(SITE, space), expected=others, ends_healthy=False),
        Row("/dev/shm fills under way", fill_shm, needs_filter=True),
    ]
    if can_filter():  # mounts need a private mount namespace
        found += [
            Row("a site's state folder is full", nothing, _on(SITE, wrapper=_full("{state}"))),
            Row(
                "a site's cache folder is full",
                nothing,
                _on(SITE, wrapper=_full("{cache}"), environment={"XDG_CACHE_HOME": "{cache}"}),
            ),
            Row(
                "a site's cache folder is read-only",
                nothing,
                _on(SITE, wrapper=_read_only("{cache}"), environment={"XDG_CACHE_HOME": "{cache}"}),
            ),
            Row(
                "a site's KV disk is full, then has room",
                kv_disk_fills,
                _on(SITE, edit=_kv_disk, wrapper=_small("{kv}", "8m")),
                names=(SITE,),
            ),
            Row(
                "a site's temporary folder is full",
                nothing,
                _on(SITE, wrapper=_full("{tmp}"), environment={"TMPDIR": "{tmp}"}),
            ),
        ]
    if os.access(CGROUP, os.W_OK):
        found += [
            Row(f"{mib} MiB of memory for a site", nothing, _on(SITE, wrapper=_in_cgroup(mib)), expected=("iad1", "sin1"), ends_healthy=False)
            for mib in (260, 150, 60)
        ]  # fmt: skip
    return found


def _on(
    name: str,
    wrapper: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
    edit: Callable[[str], str] = str,
) -> dict[str, Differently]:
    """Return the changes of one member's settings.

    `{state}`, `{cache}`, `{kv}` and `{tmp}` in them become new temporary folders, which are not removed.
    """
    import tempfile

    base = tempfile.mkdtemp(prefix="pilotlight-fault-")

    def placed(text: str) -> str:
        for folder in ("state", "cache", "kv", "tmp"):
            text = text.replace(f"{{{folder}}}", f"{base}/{folder}")
        return text

    for folder in ("state", "cache", "kv", "tmp"):
        os.mkdir(f"{base}/{folder}", 0o700)
    values = {key: placed(value) for key, value in (environment or {}).items()}
    if any("{state}" in word for word in wrapper):
        values["XDG_STATE_HOME"] = f"{base}/state"
    return {
        name: Differently(values, edit=lambda text: placed(edit(text)), wrapper=tuple(placed(word) for word in wrapper))
    }


def _files(count: int) -> tuple[str, ...]:
    return ("prlimit", f"--nofile={count}:{count}")


def _shell(script: str) -> tuple[str, ...]:
    return ("sh", "-c", script + ' && exec "$@"', "sh")


def _small(folder: str, size: str) -> tuple[str, ...]:
    return _shell(f"mount -t tmpfs -o size={size},mode=700 tmpfs {folder}")


def _full(folder: str) -> tuple[str, ...]:
    return _shell(
        f"mount -t tmpfs -o size=64k,mode=700 tmpfs {folder}; dd if=/dev/zero of={folder}/filled bs=1k 2>/dev/null; true"
    )


def _read_only(folder: str) -> tuple[str, ...]:
    return _shell(f"mount -t tmpfs -o ro,size=64k,mode=700 tmpfs {folder}")


def _in_cgroup(mib: int) -> tuple[str, ...]:
    group = f"{CGROUP}/pilotlight-fault-{mib}"
    return _shell(
        f"mkdir -p {group} && echo {mib << 20} > {group}/memory.limit_in_bytes && echo $$ > {group}/cgroup.procs"
    )


def _kv_disk(text: str) -> str:
    tiers = 'kv_host_gib = 0.01\nkv_disk_dir = "{kv}"\nkv_disk_gib = 0.05'
    return text.replace("kv_gib = 0.125", f"kv_gib = 0.03\n{tiers}")


def nothing(it: Strike) -> None:
    """Do nothing: the fault exists from the start."""
    time.sleep(1)


def crowd(it: Strike) -> None:
    """Send 60 requests from 20 clients beside the streams; note their statuses."""
    body = orjson.dumps({"model": "ember", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]})

    def ask(_: int) -> str:
        request = urllib.request.Request(
            f"{it.network.url}/v1/chat/completions", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return str(answer.status)
        except urllib.error.HTTPError as error:
            return str(error.code)
        except OSError as error:
            return type(error).__name__

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(60)))
    it.notes["crowd"] = {status: answers.count(status) for status in sorted(set(answers))}
    if "500" in answers:
        raise RuntimeError("a client was answered with a 500")


def fill_shm(it: Strike) -> None:
    """Limit the size of /dev/shm and fill it, in this mount namespace only."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)
    try:
        Path("/dev/shm/filled").write_bytes(bytes(1 << 20))
        time.sleep(5)
    finally:
        subprocess.run(["umount", "/dev/shm"], check=False)


def kv_disk_fills(it: Strike) -> None:
    """Send different prompts until the disk tier is full, and again after its other files are removed."""
    from load_tests.faults.processes import engine

    def prompts(count: int, salt: str) -> None:
        for number in range(count):
            words = " ".join(f"{salt}{number}x{i}" for i in range(150))
            body = orjson.dumps({"model": "ember", "max_tokens": 1, "messages": [{"role": "user", "content": words}]})
            request = urllib.request.Request(
                f"{it.network.url}/v1/chat/completions", body, {"content-type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=30).close()

    engine(it, SITE)
    prompts(60, "a")
    it.notes["warnings"] = [line for line in it.network.log(SITE).splitlines() if "disk" in line.lower()][-4:]
