"""Starts a device's engine host as a child process, connected by a socket for this user only.

The process ends when its parent dies.
"""

import os
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from pilotlight.engine.api.client import EngineClient
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.runtime.hosts.cores import Cores, divided, keep_to
from pilotlight.runtime.hosts.devices import is_surely_cpu
from pilotlight.runtime.hosts.host_process import HostProcess
from pilotlight.runtime.hosts.memory import GIB
from pilotlight.runtime.hosts.socket_directory import SocketDirectory, remove_dead_later
from pilotlight.runtime.hosts.tier_directory import TierDirectory, kv_places, owners_of
from pilotlight.sites.site import EngineConfig

_CPU_KV_GIB = 0.25  # size of the KV cache on a CPU if the site's file sets none
SECRET_ENDINGS = ("_SECRET", "_TOKEN", "_KEY", "_PASSWORD")


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

    async def launch(self, *, standby: bool = False, afresh: bool = False) -> HostProcess:
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
