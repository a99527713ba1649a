"""Starts a device's engine host as a child process, connected by a socket for this user only.

The process ends when its parent dies. To stop it, it is sent SIGTERM, and is killed if it does not end; supervisor.py decides when.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pilotlight.engine.api.client import EngineClient
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.api.step_journal import HeldSequences, read_journal
from pilotlight.runtime.hosts.cores import Cores, divided, keep_to
from pilotlight.runtime.hosts.devices import is_surely_cpu
from pilotlight.runtime.hosts.socket_directory import SocketDirectory, remove_dead_later
from pilotlight.runtime.hosts.tier_directory import TierDirectory, kv_places, owners_of
from pilotlight.runtime.telemetry.process_exit import ending, is_oom_kill, oom_kills
from pilotlight.sites.site import EngineConfig

log = logging.getLogger("pilotlight.engine")

GIB = 1 << 30
_CPU_KV_GIB = 0.25  # size of the KV cache on a CPU if the site's file sets none
CRASHES = {-signal.SIGBUS, -signal.SIGILL, -signal.SIGSEGV}
# Signals that a process's own code causes. Others come from outside: an operator, a supervisor, or the kernel's OOM killer.
OWN_SIGNALS = CRASHES | {-signal.SIGABRT, -signal.SIGFPE, -signal.SIGSYS, -signal.SIGTRAP}
SECRET_ENDINGS = ("_SECRET", "_TOKEN", "_KEY", "_PASSWORD")
CLOSE_WITHIN_S = 5.0  # limit of the time for a socket's last messages, which take at most a second


class ProcessLauncher:
    """Starts the engine hosts of one device of a site.

    If the site has KV tiers, no other process of this machine may use its name.
    """

    def __init__(
        self,
        config: EngineConfig,
        owner: str,
        group: tuple[str, ...],
        places: Sequence[TierDirectory],
        cores: Cores | None = None,
        *,
        model_bytes: tuple[int, ...] = (),
    ) -> None:
        """Create the launcher of one device.

        `owner` names the owner of stored data: the site, or one of its devices. `group` lists the devices that share every model. `places` are the
        tier directories of all the site's devices, this one's first. `cores` are the host's cores, or None for all.
        """
        self._model_bytes = model_bytes
        self._config = config
        self._owner = owner
        self._group = group
        self._places = places
        self._cores = cores

    def close(self) -> None:
        """Remove shared files. Call it after the last host has ended."""
        self._places[0].remove()

    async def launch(self, *, standby: bool = False, afresh: bool = False) -> "HostProcess":
        """Start an engine host.

        `standby`: no request waits for it, so it prepares itself completely and at low priority. `afresh`: it removes the files that earlier hosts
        have generated, instead of using them."""
        tier_place = self._claim_tier_place()
        place = SocketDirectory()
        peer_address = place.peer_address if self._config.is_split and tier_place is not None else None
        config = host_config(self._config, self._group, self._owner, tier_place, peer_address, self._model_bytes)
        try:
            process = await _start(
                *("--address", place.address, "--parent", str(os.getpid())),
                *("--journal", str(place.journal)),
                *("--config", msgspec.json.encode(config).decode()),
                *(("--standby",) if standby else ()),
                *(("--afresh",) if afresh else ()),
            )
            if self._cores is not None:
                keep_to(process.pid, self._cores)
        except BaseException:
            place.remove()
            raise
        return HostProcess(process, _connect(place.address), place, peer_address)

    def _claim_tier_place(self) -> Path | None:
        if not self._config.kv_host_gib:
            self._places[0].remove_dead_later()
            return None
        # Claim all directories before dead ones are removed, so that none of these counts as dead.
        claimed = [place.claim() for place in self._places]
        self._places[0].remove_dead_later()
        return claimed[0]


class HostProcess:
    """A started engine host process."""

    def __init__(
        self, process: Process, client: EngineClient, place: SocketDirectory, peer_address: str | None = None
    ) -> None:
        self._process = process
        self.client = client
        self._place = place
        self._oom_kills = oom_kills()
        self.url = place.address  # address of its socket
        self.peer_address = peer_address  # address for its KV blocks to the site's other hosts; None if not served

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def exited(self) -> str:
        """Wait until the process has ended; return a sentence with the reason."""
        code = await self._process.wait()
        return f"the engine host (pid {self._process.pid}) {ending(code, self._oom_kills)}"

    @property
    def has_crashed(self) -> bool:
        """Tell whether the process ended by a signal of damaged code, or of a damaged file in a memory map."""
        return self._process.returncode in CRASHES

    @property
    def ended_by_itself(self) -> bool:
        """Tell whether the process ended by its own error or signal, and was not killed from outside."""
        code = self._process.returncode
        return code is not None and (code > 0 or code in OWN_SIGNALS)

    @property
    def was_killed(self) -> bool:
        """Tell whether a signal from outside ended the process, such as an operator's.

        Call it before `stop`, which sends signals itself. False after the OOM killer: the next host may need as much memory.
        """
        code = self._process.returncode
        return code is not None and code < 0 and code not in OWN_SIGNALS and not is_oom_kill(code, self._oom_kills)

    @property
    def is_suspended(self) -> bool:
        """Tell whether the process was stopped by a signal (state T or t in proc(5))."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def held(self) -> HeldSequences:
        """Return the sequences that the host has last recorded as open."""
        return read_journal(self._place.journal)

    async def stop(self, grace_s: float) -> None:
        """Stop the process, kill it if it lives after `grace_s`, and remove the directory of its socket."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.client.close(), CLOSE_WITHIN_S)
            if self._process.returncode is None and grace_s > 0:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), grace_s)
        finally:
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            self._place.remove()


def launchers_of(
    config: EngineConfig,
    site: str,
    model_bytes: Callable[[int], tuple[int, ...]] = lambda ranks: (),
) -> list[ProcessLauncher]:
    """Return one launcher for each of the site's devices.

    `model_bytes` returns the models' sizes for a number of ranks. The sockets of dead sites are removed a little later.
    """
    remove_dead_later()
    devices = config.device_groups
    owners, places = owners_of(site, len(devices)), kv_places(site, len(devices))
    on_cpu = len(devices) > 1 and devices[0][0] == "cpu"
    cores = divided([_num_near(group) for group in devices]) if on_cpu else [None] * len(devices)

    def sizes(group: tuple[str, ...]) -> tuple[int, ...]:
        """Return the models' sizes; empty unless the KV cache gets the rest of a GPU's memory."""
        return () if config.kv_gib is not None or is_surely_cpu(group[0]) else model_bytes(len(group))

    return [
        ProcessLauncher(
            config,
            owner,
            group,
            [places[i], *places[:i], *places[i + 1 :]],
            own,
            model_bytes=sizes(group),
        )
        for i, (owner, group, own) in enumerate(zip(owners, devices, cores, strict=True))
    ]


def _num_near(group: tuple[str, ...]) -> int:
    """Return the number of a host's ranks on this machine."""
    return sum(not device.startswith("ray:") for device in group)


def host_config(
    config: EngineConfig,
    group: tuple[str, ...],
    owner: str,
    tier_place: Path | None,
    peer_address: str | None = None,
    model_bytes: tuple[int, ...] = (),
) -> HostConfig:
    """Return a host's configuration.

    `tier_place` is the directory of blocks that outlive the host; None to keep none in memory or on disk. `peer_address` is where other hosts of the
    site fetch blocks.
    """
    disk = config.kv_disk_dir if tier_place is not None else None
    return HostConfig(
        device="cpu" if is_surely_cpu(group[0]) else group[0],
        group=group if len(group) > 1 else (),
        ray_address=config.ray_address,
        stages=config.stages if len(group) > 1 else 1,
        expert_parallel=config.expert_parallel and len(group) > 1,
        redundant_experts=config.redundant_experts if len(group) > 1 else 0,
        data_parallel=config.data_parallel if len(group) > 1 else 1,
        threads=config.threads,
        kv_bytes=round((_CPU_KV_GIB if config.kv_gib is None else config.kv_gib) * GIB),
        model_bytes=model_bytes,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_decode_delay_ms=config.max_decode_delay_ms,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        adapter_slots=config.adapter_slots,
        adapter_host_bytes=round(config.adapters_host_gib * GIB),
        kv_host_bytes=round(config.kv_host_gib * GIB) if tier_place is not None else 0,
        kv_host_dir=None if tier_place is None else str(tier_place),
        kv_disk_bytes=round(config.kv_disk_gib * GIB) if disk is not None else 0,
        kv_disk_write_bytes_per_s=config.kv_disk_write_mib_per_s * 2**20,
        kv_disk_dir=None if disk is None else str(Path(disk).expanduser().absolute() / owner),
        kv_store=config.kv_store if tier_place is not None else None,
        peer_address=peer_address,
        peer_transport=config.kv_transport,
    )


async def _start(*arguments: str) -> Process:
    return await create_subprocess_exec(
        *(sys.executable, "-m", "pilotlight.engine.host.engine_host", *arguments),
        stdin=DEVNULL,
        env=host_environment(),
        # A terminal's Ctrl-C reaches every process of its group, but the host must outlive its site's drain.
        start_new_session=True,
    )


def host_environment() -> dict[str, str]:
    """Return this process's environment without secrets: an engine host reads untrusted checkpoints."""
    return {name: value for name, value in os.environ.items() if not name.endswith(SECRET_ENDINGS)}


def _connect(address: str) -> EngineClient:
    from pilotlight.engine.api.socket_client import SocketEngineClient

    return SocketEngineClient(address)
