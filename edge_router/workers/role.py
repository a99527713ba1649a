"""The place of a worker among the processes of one router, and its configuration."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from pilotlight.sites.config import ConfigError
from pilotlight.sites.network import NetworkConfig
from pilotlight.wire.hop.meters import FILE_NAME, is_in_use

WORKER_ENV = "PILOTLIGHT_WORKER"
MAX_WORKERS = 64
_FOLDER = re.compile(r"worker-(\d+)(?:\.\d+)?")  # name of a worker's folder in the ledger's directory
_COUNTED = ("requests_per_min", "tokens_per_min", "max_open", "tokens_per_day", "cost_per_day")


@dataclass(frozen=True, slots=True)
class WorkerRole:
    index: int
    count: int
    listener: int  # file descriptor of the listening socket
    folder: Path  # private to the processes of this router

    @classmethod
    def present(cls) -> "WorkerRole | None":
        """Return the role that the supervisor gave to this process; None in a router of one process."""
        given = os.environ.pop(WORKER_ENV, None)  # removed, so that this process's children do not inherit it
        if given is None:
            return None
        index, count, listener, folder = given.split(",", 3)
        return cls(int(index), int(count), int(listener), Path(folder))

    def encode(self) -> str:
        return f"{self.index},{self.count},{self.listener},{self.folder}"

    def socket_of(self, index: int) -> Path:
        """Return the path of the socket on which a worker answers other workers."""
        return self.folder / f"worker-{index}.sock"

    @property
    def process_socket(self) -> Path:
        """Return the path of this process's socket.

        It keeps this name when a successor takes the worker's."""
        return self.folder / f"{os.getpid()}.sock"

    @property
    def first_socket(self) -> Path:
        """Return the path of the first worker's socket. It keeps the state that only one process can keep."""
        return self.folder / "first.sock"

    def ready_file(self, pid: int) -> Path:
        """Return the file that exists while the process is ready to serve."""
        return self.folder / f"{pid}.ready"

    def listening(self) -> socket.socket:
        """Return the supervisor's socket, which outlives this process."""
        return socket.socket(fileno=self.listener)

    def configured(self, network: NetworkConfig) -> NetworkConfig:
        """Return the configuration for this worker, with its own folder for the ledger."""
        ledger = network.ledger
        if ledger.directory is None:
            return network
        folder = self._ledger_folder(Path(ledger.directory).expanduser())
        return replace(network, ledger=replace(ledger, directory=str(folder)))

    def _ledger_folder(self, kept: Path) -> Path:
        """Return the folder of this process's meters, in which no process counts.
        A worker that this process replaces counts in its own folder until its last stream has ended."""
        usual = kept / f"worker-{self.index}" if self.index else kept
        folders = [usual, *sorted(kept.glob(f"worker-{self.index}.*"))]
        free = [folder / FILE_NAME for folder in folders if not is_in_use(folder / FILE_NAME)]
        if not free:
            return kept / f"worker-{self.index}.{len(folders)}"
        # the last one that was used, because a killed process may have left counts there
        return max(free, key=lambda file: file.stat().st_mtime if file.exists() else 0.0).parent


def abandoned_ledgers(kept: Path, own: Path, role: WorkerRole | None) -> list[Path]:
    """Return the folders in `kept` with meters of ended processes, whose records this process writes.

    They are the other folders of its index, and for the first process those of indices that this router does not have. `own` is its folder.
    """
    index, count = (0, 1) if role is None else (role.index, role.count)
    numbers = {kept: 0}
    for folder in sorted(kept.glob("worker-*")):
        if (found := _FOLDER.fullmatch(folder.name)) is not None:
            numbers[folder] = int(found[1])
    ours = [each for each, number in numbers.items() if number == index or (index == 0 and number >= count)]
    files = [folder / FILE_NAME for folder in ours if folder != own]
    return [file.parent for file in files if file.exists() and not is_in_use(file)]


def check_workers(network: NetworkConfig, count: int) -> None:
    """Raise ConfigError if several processes together cannot keep to the configuration."""
    if not 1 <= count <= MAX_WORKERS:
        raise ConfigError(f"--workers must be between 1 and {MAX_WORKERS}, not {count}")
    if count == 1:
        return
    if network.door.server_name != "own":
        raise ConfigError(f"--workers needs the router's own server, and door.server is {network.door.server_name}")
    limited = [*(account for account in network.accounts), network.tenant_limits]
    if network.quotas.store is None and any(getattr(each, name, None) for each in limited for name in _COUNTED):
        raise ConfigError("each worker would grant an account's whole limits: set quotas.store, or run one worker")
    if network.ledger.directory is not None and network.ledger.store is None:
        raise ConfigError("the ledger's SQLite file belongs to one process: set ledger.store, or run one worker")
    if network.objectives:
        raise ConfigError("[[objectives]] are counted in one process: remove them, or run one worker")
