"""The speed of KV blocks between engine hosts. `make bench-block-transports` runs it.

64 MiB of blocks in the host tier of one process are fetched into that of another through each transport, with leases, checksums and headers as in
serving. They are also written to a Mooncake Store in a third process and fetched from there. For comparison, the same bytes go over a plain socket
between the two processes, and through a memcpy. Figures are medians; transports take turns. Then the one process computes a prompt of 4,096 tokens
with random weights of a 0.5 B shape, in chunks, and the other fetches its blocks meanwhile. The result is the share of the transfer that is done when
the last chunk is computed.
"""

import argparse
import ctypes
import multiprocessing
import os
import random
import socket
import tempfile
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from isal.isal_zlib import crc32
from rich.console import Console
from rich.table import Table

from load_tests.random_checkpoint import SHAPES as CHECKPOINTS
from load_tests.random_checkpoint import Shape, write
from load_tests.records import spread, write_record
from load_tests.store_process import store_process
from pilotlight.engine.api.protocol import BlockSource, HostConfig, ModelSpec, SamplingParams, Submit
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.peers.block_server import BlockServer
from pilotlight.engine.kv.peers.messages import PeerError
from pilotlight.engine.kv.peers.mooncake import TransferEngine
from pilotlight.engine.kv.peers.peer_thread import PeerThread
from pilotlight.engine.kv.peers.transports import INLINE, MOONCAKE, SHARED_MEMORY
from pilotlight.engine.kv.pool.prefix_index import CacheIdentity, chain_root, extend_chain
from pilotlight.engine.kv.shared_tiers import open_tiers
from pilotlight.engine.kv.store.store_thread import StoreThread
from pilotlight.engine.kv.tiered_cache import TieredCache
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.tiers.tier_read import TierRead
from pilotlight.engine.kv.transfer.block_copier import make_copier
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model

SHAPES = {**CHECKPOINTS, "0.5b": Shape(1024, 4096, 28, 16, 8, 64, 16_384)}
TOTAL_BYTES = 64 << 20
BLOCK_BYTES = 192 << 10  # 16 tokens of Qwen2.5-0.5B's shape in bfloat16
NUM_BLOCKS = TOTAL_BYTES // BLOCK_BYTES
IDENTITY = CacheIdentity("bench", "bfloat16", 16)
NAMES = [i.to_bytes(32, "little") for i in range(NUM_BLOCKS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunks", type=int, nargs="*", default=[512, 1024, 2048], help="tokens of one")
    options = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="pilotlight-", dir=_memory()) as folder:
        with store_process(0.25) if _engine() is not None else nullcontext() as store:
            results = measure(Path(folder), options.rounds, store)
        results["hidden"] = [hidden(Path(folder), options, chunk) for chunk in options.chunks]
    for found in results["hidden"]:
        console.print(found)
    table = Table("way", "64 MiB in ms (median)", "GB/s")
    for name, found in results["ms"].items():
        table.add_row(name, f"{found['median']:.1f}", f"{TOTAL_BYTES / found['median'] / 1e6:.2f}")
    console.print(table)
    console.print(
        f"Record: {write_record('block-transports', results, ('mooncake-transfer-engine-non-cuda', 'pyzmq'))}",
        soft_wrap=True,
    )


def measure(folder: Path, rounds: int, store: str | None) -> dict[str, Any]:
    engine = _engine()
    kinds = [SHARED_MEMORY, INLINE, *([MOONCAKE] if engine is not None else [])]
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, store, theirs))
    server.start()
    port = ours.recv()
    tier = HostTier.open(folder / "here", 2 * TOTAL_BYTES)
    tier.add_size(BLOCK_BYTES)
    readers = {kind: PeerThread(tier, transports=[kind], engine=engine) for kind in kinds}
    stored = None if store is None else StoreThread(store, tier)
    ways = [*kinds, *(["store"] if stored is not None else []), "plain socket", "memcpy"]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):  # the first round does not count: it touches pages and connects peers
        for kind, reader in readers.items():
            taken_ms = _fetch_ms(reader, tier, f"ipc://{folder}/blocks")
            times[kind] += [taken_ms] if i else []
        if stored is not None:
            taken_ms = _store_ms(stored, tier)
            times["store"] += [taken_ms] if i else []
        times["plain socket"] += [_socket_ms(port)] if i else []
        times["memcpy"] += [_memcpy_ms()] if i else []
    for reader in readers.values():
        reader.close()
    if stored is not None:
        stored.close()
    tier.close()
    ours.send("end")
    server.join()
    return {
        "bytes": TOTAL_BYTES,
        "block_bytes": BLOCK_BYTES,
        "ms": {name: spread(found) for name, found in times.items()},
    }


def serve(folder: Path, store: str | None, pipe: "Connection[Any, Any]") -> None:
    """Hold the blocks, and send the same bytes to each client of a socket, until asked to end."""
    tier = HostTier.open(folder / "there", 2 * TOTAL_BYTES)
    tier.add_size(BLOCK_BYTES)
    for name in NAMES:
        slot = tier.reserve(name, BLOCK_BYTES)
        assert slot is not None
        slot.memory[:] = os.urandom(BLOCK_BYTES)
        tier.commit(slot, crc32(slot.memory))
        tier.unpin([slot])
    if store is not None:
        _fill_store(store, tier)
    server = BlockServer(f"ipc://{folder}/blocks", tier, engine=_engine())
    server.add_cache(IDENTITY)
    server.begin("bench")
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)
    pipe.send(listener.getsockname()[1])
    content = os.urandom(TOTAL_BYTES)
    while not pipe.poll(0):
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            continue
        with connection:
            connection.sendall(content)
    server.close()
    tier.close()


def hidden(folder: Path, options: argparse.Namespace, chunk: int) -> dict[str, Any]:
    """Compute a prompt in another process and fetch its blocks meanwhile.

    Fetch them once more afterwards, and copy them to a device's memory.
    """
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    place = folder / f"chunks-{chunk}"
    computing = multiprocessing.get_context("spawn").Process(
        target=compute, args=(place, options.shape, options.tokens, chunk, theirs)
    )
    computing.start()
    identity, names, block_bytes = ours.recv()
    tier = HostTier.open(place / "here", 2 * len(names) * block_bytes)
    tier.add_size(block_bytes)
    reader = PeerThread(tier)
    source = BlockSource(f"ipc://{place}/blocks", "prefill", 600.0)
    ours.send("begin")
    read = reader.read(source, identity, names, block_bytes)
    arrived_at = _wait(read)
    began_at, computed_at, stored_s = ours.recv()
    device = torch.zeros(len(names), block_bytes, dtype=torch.uint8)
    copying_at = time.monotonic()
    make_copier(device).fetch(range(len(names)), [slot.memory for slot in read.slots], None)
    copied_s = time.monotonic() - copying_at
    tier.unpin(read.take())
    tier.forget(names)
    again_at = time.monotonic()
    again = reader.read(source, identity, names, block_bytes)
    fetched_s = _wait(again) - again_at
    tier.unpin(again.take())
    reader.close()
    tier.close()
    ours.send("end")
    computing.join()
    moved_s, exposed_s = stored_s + fetched_s + copied_s, arrived_at - computed_at + copied_s
    return {
        "chunk": chunk,
        "blocks": len(names),
        "bytes": len(names) * block_bytes,
        "prefill_s": round(computed_at - began_at, 4),
        "stored_s": round(stored_s, 4),
        "fetched_s": round(fetched_s, 4),
        "copied_s": round(copied_s, 4),
        "exposed_s": round(exposed_s, 4),
        "hidden_share": round(1 - exposed_s / moved_s, 4),
    }


def _wait(read: TierRead) -> float:
    """Wait until a read is complete; return the time, on the clock that all processes of a machine share."""
    while not read.is_done:
        time.sleep(0.0005)
    assert len(read.slots) == len(read.hashes), f"{len(read.slots)} of {len(read.hashes)} blocks came"
    return time.monotonic()


def compute(place: Path, shape: str, tokens: int, chunk: int, pipe: "Connection[Any, Any]") -> None:
    """Compute a prompt for another process as an engine host does; then serve its blocks until the end."""
    place.mkdir()
    model = write(place / "model", SHAPES[shape])
    config = HostConfig(
        threads=1, kv_bytes=1 << 30, kv_host_bytes=1 << 30, kv_host_dir=str(place / "there"),
        peer_address=f"ipc://{place}/blocks", max_num_batched_tokens=chunk,
    )  # fmt: skip
    tiers = open_tiers(config)
    assert tiers is not None
    engine = load_model(
        ModelSpec("m", str(model), kv_tokens=tokens + 256), config, make_kv_memory(config), tiers=tiers
    ).engine
    draw = random.Random(1)
    prompt = tuple(draw.randrange(3, 500) for _ in range(tokens + 1))
    one = SamplingParams(1, temperature=0.0, ignore_eos=True)
    engine.submit(Submit("warm", "m", prompt[:64][::-1], one))  # touch pages and load the library
    while engine.has_work:
        engine.step()
    assert isinstance(engine.tiers, TieredCache)
    names: list[bytes] = []
    identity = engine.identity
    assert isinstance(engine.runner, ModelRunner)
    block_bytes = engine.runner.kv_cache.shape[1]
    extend_chain(names, chain_root(b"", identity), prompt[:tokens], config.block_size)
    pipe.send((identity, names, block_bytes))
    pipe.recv()
    began_at = time.monotonic()
    engine.submit(Submit("prefill", "m", prompt, one, hands_over=True))
    computed_at = 0.0
    while engine.has_work:
        engine.step()
        if not computed_at and engine.load().waiting_tokens <= 1:  # all blocks that will be handed over are computed
            computed_at = time.monotonic()
        engine.on_idle()
    engine.on_idle()
    engine.tiers.wait_until_idle(60)
    stored_s = len(names) * block_bytes / engine.tiers.mover.store_rate.bytes_per_s
    pipe.send((began_at, computed_at, stored_s))
    pipe.recv()
    engine.close()
    tiers.close()


def _fetch_ms(reader: PeerThread, tier: HostTier, address: str) -> float:
    tier.forget(NAMES)
    began = time.perf_counter()
    read = reader.read(BlockSource(address, "bench", 60.0), IDENTITY, NAMES, BLOCK_BYTES)
    while not read.is_done:
        time.sleep(0.0005)
    taken_ms = 1e3 * (time.perf_counter() - began)
    slots = read.take()
    assert len(slots) == NUM_BLOCKS, f"{len(slots)} of {NUM_BLOCKS} blocks came"
    tier.unpin(slots)
    return taken_ms


def _fill_store(address: str, tier: HostTier) -> None:
    writer = StoreThread(address, tier)
    while not writer.is_usable:
        time.sleep(0.01)
    for name in NAMES:
        writer.offer(name)
    assert writer.wait_until_idle(60)
    writer.close()


def _store_ms(store: StoreThread, tier: HostTier) -> float:
    while not store.is_usable:
        time.sleep(0.01)
    tier.forget(NAMES)
    began = time.perf_counter()
    lookup = store.look_up(NAMES)
    while not lookup.is_done:
        time.sleep(0.0005)
    assert all(name in store for name in NAMES), "not all blocks are in the store"
    read = store.read(NAMES, BLOCK_BYTES)
    _wait(read)
    taken_ms = 1e3 * (time.perf_counter() - began)
    tier.unpin(read.take())
    return taken_ms


def _socket_ms(port: int) -> float:
    into = memoryview(bytearray(TOTAL_BYTES))
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        received = 0
        while received < TOTAL_BYTES:
            received += connection.recv_into(into[received:])
    return 1e3 * (time.perf_counter() - began)


def _memcpy_ms() -> float:
    source, into = ctypes.create_string_buffer(TOTAL_BYTES), ctypes.create_string_buffer(TOTAL_BYTES)
    ctypes.memmove(into, source, TOTAL_BYTES)
    began = time.perf_counter()
    ctypes.memmove(into, source, TOTAL_BYTES)
    return 1e3 * (time.perf_counter() - began)


def _engine() -> TransferEngine | None:
    try:
        return TransferEngine("127.0.0.1")
    except PeerError:  # the transport is not installed, and is left out of the record
        return None


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()
