"""Fault rows: files that are damaged before a site's next process starts and reads them."""

import os
import random
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import orjson

import pilotlight.engine
from load_tests.faults.members import Differently
from load_tests.faults.processes import kill_and_await, kill_site
from load_tests.faults.rows import Fault, Row, Strike

SITES = ("ams1", "iad1", "sin1")
EMBER = Path(pilotlight.engine.__file__).parent / "embedded" / "ember"
Damage = Callable[[Path], None]
COMPILED_WITHIN_S = 300.0  # limit until a site has compiled the kernels library, on a busy machine


def rows() -> list[Row]:
    found = []
    for name, damage in (
        ("the kernels library is cut to half", _cut),
        ("400 flips in the kernels library", _flips(400, after=0.05)),
        ("the kernels library is empty", _emptied),
    ):
        cache = Path(tempfile.mkdtemp(prefix="pilotlight-fault-"))
        shared = {site: Differently({"XDG_CACHE_HOME": str(cache)}) for site in SITES}
        found.append(Row(name, _nothing, shared, before=_in_cache(cache, damage), streams=8))
    for name, damage in (
        ("4,000 flips in a plain checkpoint", _flips(4000, after=0.1)),
        ("a plain checkpoint is cut", _cut),
    ):
        model = Path(tempfile.mkdtemp(prefix="pilotlight-fault-")) / "ember"
        elsewhere = {"ams1": Differently({"XDG_CACHE_HOME": str(model.parent)}, _other_source(model))}
        before = _in_checkpoint(model, damage)
        found.append(
            Row(name, _nothing, elsewhere, expected=("iad1", "sin1"), before=before, ends_healthy=False, streams=8)
        )
    for name, damage in (
        ("3,000 flips in each segment of the KV disk", _flips(3000)),
        ("the KV disk's segments are cut to half", _cut),
    ):
        folder = Path(tempfile.mkdtemp(prefix="pilotlight-fault-"))
        tiered = {"ams1": Differently(edit=_with_tiers(folder))}
        found.append(Row(name, _nothing, tiered, names=("ams1",), before=_in_tier(folder, damage), streams=8))
    return found


def _nothing(it: Strike) -> None:
    time.sleep(1)


def _in_cache(cache: Path, damage: Damage) -> Fault:
    """Return a fault that damages files after each site has served, then kills and awaits each site."""

    def strike(it: Strike) -> None:
        warm(it)
        # Damage only finished files. A file that is being written is in a separate folder, or its name begins with a dot.
        files = _wait_for(lambda: [*cache.glob("pilotlight/kernels/[!.]*.so")], COMPILED_WITHIN_S)
        for file in files:
            damage(file)
        it.notes["damaged"] = [file.name for file in files]
        began = time.monotonic()
        kill_and_await(it, it.network.site_urls)
        it.notes["up_again_after_s"] = round(time.monotonic() - began, 1)

    return strike


def _in_checkpoint(model: Path, damage: Damage) -> Fault:
    def strike(it: Strike) -> None:
        it.network.wait_until_up()
        warm(it)
        # The first load writes digests of the checkpoint.
        _wait_for(lambda: [*model.parent.glob("pilotlight/digests/*.json")], 60)
        damage(model / "model.safetensors")
        kill_site(it, "ams1")
        time.sleep(6)
        said = [line for line in it.network.log("ams1").splitlines() if "model" in line]
        it.notes["said"] = said[-2:]

    shutil.copytree(EMBER, model, ignore=shutil.ignore_patterns("corpus", "*.py"))
    return strike


def _in_tier(folder: Path, damage: Damage) -> Fault:
    def strike(it: Strike) -> None:
        for number in range(60):
            warm(it, f"{number} ")
        files = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size > 4096]
        for file in files:
            damage(file)
        it.notes["damaged"] = len(files)
        kill_and_await(it, ("ams1",))

    return strike


def _with_tiers(folder: Path) -> Callable[[str], str]:
    """Return an edit of a site's file that makes its tiers so small that cached blocks reach the disk."""
    tiers = f'kv_host_gib = 0.01\nkv_disk_dir = "{folder}"\nkv_disk_gib = 0.2'
    return lambda text: text.replace("kv_gib = 0.125", f"kv_gib = 0.03\n{tiers}")


def _other_source(model: Path) -> Callable[[str], str]:
    return lambda text: text.replace('"embedded:ember"', f'"{model}"')


def warm(it: Strike, salt: str = "") -> None:
    """Let each site answer a request by itself, then stay idle until it has written its blocks."""
    for url in it.network.site_urls.values():
        body = orjson.dumps(
            {"model": "ember", "max_tokens": 16, "messages": [{"role": "user", "content": salt + "Hello " * 150}]}
        )
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
        urllib.request.urlopen(request, timeout=60).close()


def _flips(count: int, after: float = 0.02) -> Damage:
    """Return a function that flips `count` bits of a file at random places after its first share `after`."""

    def damage(file: Path) -> None:
        size = file.stat().st_size
        rng = random.Random(7)
        with file.open("r+b") as content:
            for _ in range(count):
                position = rng.randrange(int(size * after), size)
                content.seek(position)
                byte = content.read(1)[0]
                content.seek(position)
                content.write(bytes([byte ^ (1 << rng.randrange(8))]))

    return damage


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _emptied(file: Path) -> None:
    os.truncate(file, 0)


def _wait_for(find: Callable[[], list[Path]], seconds: float) -> list[Path]:
    deadline = time.monotonic() + seconds
    while not (found := find()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no such file was written within {seconds:g} s")
        time.sleep(0.2)
    return found
