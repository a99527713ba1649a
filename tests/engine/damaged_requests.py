"""Run thousands of requests through damaged tiers: `python -m tests.engine.damaged_requests --requests 10000`.

In each round an engine fills a tier with prompts that no other round has, the tier is damaged, and another engine answers the same prompts with it.
Every answer must be that of an engine without tiers. Damage must be counted: in each block, or at least in each chain, whose further blocks are not
read after a damaged one; or once in a damaged file or run of bytes. Then the share of the checks in the processor time of a model's steps is
measured.

With `--without-check TIER` that tier's checksums are not compared: the run must fail. Exits with 1 if anything is wrong.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
from isal.isal_zlib import crc32
from rich.console import Console

from load_tests.random_checkpoint import EMBER
from pilotlight.engine.kv.tiered_cache import TieredCache
from tests.checkpoints import write_llama
from tests.engine.conftest import make_transfers_pay
from tests.engine.damaged_tiers import (
    CHECKED_IN,
    DISK,
    HOST,
    PEER,
    STORE,
    TRANSPORTS,
    Counted,
    Damaged,
    damaged_disk,
    damaged_host,
    damaged_peer,
    damaged_store,
    opened,
    remove_check,
    undamaged,
)
from tests.engine.driver import drain, load_engine, random_prompt, submit

PROMPTS = 25  # prompts of a round
BLOCK = 16  # tokens of a block
EMBER_TOKENS = 2000  # tokens of the embedded model that prompts are drawn from
MOST_SHARE = 0.01  # of the checks in the processor time of steps

Run = Callable[[Path, list[list[int]], Path, pytest.MonkeyPatch], Damaged]


def rounds() -> Iterator[tuple[str, str, Run, Counted]]:
    """Yield tier, damage, a function that runs a round, and how often the damage is counted."""
    for damage, (_, counted) in HOST.items():
        yield "host", damage, partial(_host_round, damage), counted
    for damage, (_, counted) in DISK.items():
        yield "disk", damage, partial(_disk_round, damage), counted
    for damage, (_, counted) in STORE.items():
        yield "store", damage, partial(_store_round, damage), counted
    for transport in TRANSPORTS:
        for damage, counted in PEER.items():
            yield f"peer, {transport.__name__}", damage, partial(_peer_round, transport, damage), counted


def _host_round(damage: str, model: Path, prompts: list[list[int]], folder: Path, patch: pytest.MonkeyPatch) -> Damaged:
    return damaged_host(model, prompts, folder, damage)


def _disk_round(damage: str, model: Path, prompts: list[list[int]], folder: Path, patch: pytest.MonkeyPatch) -> Damaged:
    return damaged_disk(model, prompts, folder, damage)


def _store_round(
    damage: str, model: Path, prompts: list[list[int]], folder: Path, patch: pytest.MonkeyPatch
) -> Damaged:
    return damaged_store(model, prompts, folder, damage)


def _peer_round(
    transport: type[Any], damage: str, model: Path, prompts: list[list[int]], folder: Path, patch: pytest.MonkeyPatch
) -> Damaged:
    return damaged_peer(model, prompts, folder, transport, damage, patch)


def wrongs(found: Damaged, expected: list[list[int]], counted: Counted) -> list[str]:
    """Return a sentence for each way in which a round went wrong."""
    different = sum(one != other for one, other in zip(found.answers, expected, strict=True))
    wrong = [f"{different} answers are wrong"] if different else []
    num_blocks = found.num_blocks
    least, most = {
        "all": (num_blocks, num_blocks),
        "each": (len(expected), num_blocks),
        "once": (1, num_blocks),
        "none": (0, 0),
    }[counted]
    if not least <= found.num_corrupt <= most:
        wrong.append(f"{found.num_corrupt} damages were counted, not {least} to {most}")
    if bool(found.num_warnings) < bool(least):
        wrong.append("nothing was logged")
    return wrong


def share_of_checks() -> dict[str, float]:
    """Return the processor time of checksums per block and its share in that of the embedded model's steps, all blocks stored once and read once."""
    prompts = [random_prompt(512, seed, EMBER_TOKENS) for seed in range(4)]
    spent_s, num_blocks = 0.0, 0
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        make_transfers_pay(patch)
        for _ in range(2):  # the first engine stores the blocks, and the second one reads them
            tiers = opened(Path(folder), kv_host_bytes=64 << 20)
            engine = load_engine(EMBER, tiers=tiers, kv_tokens=4096)
            began = time.process_time()
            drain(engine, [submit(str(i), prompt, max_tokens=32) for i, prompt in enumerate(prompts)])
            spent_s += time.process_time() - began
            assert isinstance(engine.tiers, TieredCache)
            assert engine.tiers.wait_until_idle(10)
            num_blocks, block_bytes = len(tiers.host), tiers.host.space.used_bytes // len(tiers.host)
            engine.close()
            tiers.close()
    block, began = bytes(block_bytes), time.process_time()
    for _ in range(1000):
        crc32(block)
    check_s = (time.process_time() - began) / 1000
    return {
        "block_bytes": block_bytes,
        "check_us": round(1e6 * check_s, 2),
        "blocks": num_blocks,
        "steps_s": round(spent_s, 3),
        "share": round(2 * num_blocks * check_s / spent_s, 5),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only tiers whose names begin with this text")
    parser.add_argument("--without-check", choices=CHECKED_IN, help="a tier whose checksums are not compared")
    options = parser.parse_args()
    console, draw, began = Console(), Random(options.seed), time.perf_counter()
    num_requests, num_damaged, wrong, by_tier = 0, 0, list[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder, console.status("") as status:
        model = Path(folder) / "model"
        model.mkdir()
        write_llama(model)
        chosen = [each for each in rounds() if each[0].startswith(options.only)]
        for number, (tier, damage, run, counted) in enumerate(cycle(chosen)):
            if num_requests >= options.requests:
                break
            # In every second pass each prompt has one full block, and only a preempted sequence reads one more.
            longest = 90 if number // len(chosen) % 2 else 2 * BLOCK - 1
            prompts = [random_prompt(draw.randint(BLOCK + 1, longest), draw.getrandbits(32)) for _ in range(PROMPTS)]
            expected = undamaged(model, prompts)
            with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
                make_transfers_pay(patch)
                if options.without_check is not None:
                    remove_check(patch, options.without_check)
                found = run(model, prompts, Path(place), patch)
            wrong += [f"{tier}, {damage}: {one}" for one in wrongs(found, expected, counted)]
            num_requests += len(prompts)
            num_damaged += found.num_corrupt
            by_tier[tier] += found.num_corrupt
            status.update(f"{num_requests} of {options.requests} requests, {num_damaged} damages, {len(wrong)} wrong")
    checks = share_of_checks()
    if checks["share"] > MOST_SHARE:
        wrong.append(f"the checks take {100 * checks['share']:.2g} % of a step's processor time")
    for one in wrong[:50]:
        console.print(one, soft_wrap=True, markup=False)
    found_all = {"requests": num_requests, "counted": by_tier, "wrong": len(wrong), "checks": checks}
    console.print(json.dumps(found_all), soft_wrap=True, markup=False, highlight=False)
    console.print(f"{time.perf_counter() - began:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
