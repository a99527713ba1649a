"""Tier 3: the zygote of each function runs in a container, and forks the function's isolates there.

This module uses OCI bundles (https://github.com/opencontainers/runtime-spec) and the command line that crun, runc and similar runtimes share: `run`,
`delete --force`, `--preserve-fds`. The control socket is descriptor 3. The rest is the same as in other tiers, so requests to a warm function start
no container.
"""

import asyncio
import fcntl
import itertools
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from pilotlight.functions.sandbox.confinement import tiers
from pilotlight.functions.sandbox.confinement.confinement import Confinement
from pilotlight.functions.sandbox.zygotes.control_messages import CreateZygote
from pilotlight.functions.sandbox.zygotes.site_zygote import ROOT
from pilotlight.functions.sandbox.zygotes.zygote_client import LOOK_S as ZYGOTE_LOOK_S
from pilotlight.functions.sandbox.zygotes.zygote_client import ChildProcess, FunctionZygote, ZygoteError
from pilotlight.support.time_limits import Pauses, TimeLimit

CONTROL = 3  # the first descriptor that --preserve-fds keeps
LOOK_S = 0.004  # pause between checks of the pid file
START_S = 30.0
DELETE_S = 10.0
CLOSE_S = 5.0  # time for the runtime to remove its containers
INSIDE = "/opt/pilotlight"  # path of the project's files in the container
ZYGOTE_MIB = 96  # memory of the zygote itself: the interpreter with the common imports
LAST_LINES = 3
# System calls among DENIED that the OCI runtime needs to start the process; the process denies them to itself later.
NO_MEANS = (
    "execve",
    "execveat",
)
HIDDEN = (
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
HOW_TO_INSTALL = {
    "crun": "`apt-get install crun` or `dnf install crun`",
    "runc": "`apt-get install runc` or `dnf install runc`",
}


class Containers:
    """The containers of a site."""

    def __init__(self, command: str, directory: Path) -> None:
        """`command` names the OCI runtime and may have options.
        `directory` belongs to this site; `open` removes leftovers of an earlier run. Raises ZygoteError if the program is not installed."""
        program, *self._options = shlex.split(command) or [""]
        found = shutil.which(program)
        if found is None:
            name = os.path.basename(program)
            how = HOW_TO_INSTALL.get(name, "install it, or name crun or runc")
            raise ZygoteError(
                f"the OCI runtime {program!r} (functions.oci_runtime) is not installed on this machine: {how}"
            )
        self.name = os.path.basename(found)
        self._program = found
        self._directory = directory
        self._site = uuid.uuid4().hex[:8]
        self._numbers = itertools.count(1)
        self._containers: set[_Container] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        for left in sorted(self._directory.glob("bundles/*")):
            await self._delete(left.name)
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)
        for name in ("bundles", "run"):
            (self._directory / name).mkdir(mode=0o700, parents=True)

    def create_zygote(self, limits: Confinement, imports: list[str], log_fd: int) -> FunctionZygote:
        """Start a container and return at once; data sent to its zygote waits until it runs."""
        id = f"pilotlight-{self._site}-{next(self._numbers)}"
        bundle = self._directory / "bundles" / id
        write_bundle(bundle, id, limits)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.send(msgspec.msgpack.encode(CreateZygote(0, limits, imports)))
        child = ChildProcess()
        container = _Container(id, bundle, child, FunctionZygote(child, ours, pauses=Pauses(ZYGOTE_LOOK_S)), theirs)
        options = [*self._options, "--root", str(self._directory / "run"), "--log", str(container.log)]
        command = [
            *options,
            "run",
            "--bundle",
            str(bundle),
            "--pid-file",
            str(container.pid_file),
            "--preserve-fds",
            "1",
            id,
        ]
        container.monitor = _spawn(self._program, command, theirs.fileno(), log_fd)
        self._containers.add(container)
        task = asyncio.create_task(self._attend(container), name=f"container {id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return container.zygote

    async def close(self) -> None:
        for container in tuple(self._containers):
            container.zygote.close()
            container.kill()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for container in tuple(self._containers):
            with suppress(ProcessLookupError):
                os.kill(container.monitor, signal.SIGKILL)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _attend(self, container: "_Container") -> None:
        """Watch a container from its start to its end, then remove it.
        The OCI runtime's process lives as long as the container."""
        ended = asyncio.ensure_future(exit_of(container.monitor))
        try:
            async with TimeLimit(START_S):
                while not ended.done() and not container.find():
                    await asyncio.wait({ended}, timeout=LOOK_S)
        except TimeoutError:
            container.zygote.fail(f"{self.name} did not start the container within {START_S:g} s")
            container.kill()
        if not container.child.pid and not container.zygote.why_failed:
            await ended
            container.zygote.fail(
                f"{self.name}: {container.last_words() or 'the container ended at once, without an error message'}"
            )
        container.theirs.close()
        await ended
        container.child.ended(None)
        container.zygote.close()
        await self._delete(container.id)
        await asyncio.to_thread(shutil.rmtree, container.bundle, ignore_errors=True)
        self._containers.discard(container)

    async def _delete(self, id: str) -> None:
        """Delete a container that the OCI runtime left because it was killed or interrupted."""
        if not (self._directory / "run" / id).exists():
            return
        process = await asyncio.create_subprocess_exec(
            self._program, *self._options, "--root", str(self._directory / "run"), "delete", "--force", id,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(DELETE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class _Container:
    def __init__(
        self, id: str, bundle: Path, child: ChildProcess, zygote: FunctionZygote, theirs: socket.socket
    ) -> None:
        self.id = id
        self.bundle = bundle
        self.child = child
        self.zygote = zygote
        # the zygote's end of its control socket: closing it before the start succeeds or fails would end the zygote without a reason
        self.theirs = theirs
        self.log, self.pid_file = bundle / "log", bundle / "pid"
        self.monitor = 0

    def find(self) -> bool:
        """Tell whether the container's first process exists; if so, store its pid and a pidfd.
        A pidfd cannot refer to another process if the number is reused."""
        try:
            pid = int(self.pid_file.read_text())
            pidfd = os.pidfd_open(pid)
        except (OSError, ValueError):
            return False
        self.child.pid, self.child.pidfd = pid, pidfd
        self.child.started.set_result(None)
        if self.zygote.is_closed:
            self.child.kill()
        return True

    def kill(self) -> None:
        """Kill the container's process or, before it exists, the OCI runtime."""
        if not self.child.pid:
            with suppress(ProcessLookupError):
                os.kill(self.monitor, signal.SIGKILL)
        else:
            self.child.kill()

    def last_words(self) -> str:
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return "; ".join(lines[-LAST_LINES:])


def _spawn(program: str, arguments: list[str], control: int, log: int) -> int:
    """Start a program with only its control socket, and its log as output; return its pid."""
    # duplicates with numbers above 3, because the child's descriptors 0 to 3 are replaced
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (control, log)]
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    placed = ((null, 0), (high[1], 1), (high[1], 2), (high[0], CONTROL))
    try:
        return os.posix_spawn(
            program,
            [program, *arguments],
            {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in placed],
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGINT),
        )
    except OSError as error:
        raise ZygoteError(f"{program}: {error.strerror}") from None
    finally:
        for fd in (null, *high):
            os.close(fd)


async def exit_of(pid: int) -> None:
    """Wait for the exit of a child process."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    pidfd = os.pidfd_open(pid)
    try:
        loop.add_reader(pidfd, gone.set)
        await gone.wait()
        os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222  # it is over
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def write_bundle(bundle: Path, id: str, limits: Confinement) -> None:
    rootfs = bundle / "rootfs"
    rootfs.mkdir(parents=True)
    rootfs.chmod(0o755)  # despite the site's umask
    for path in (*tiers.interpreter(), "/bin"):
        if os.path.islink(path):
            link = rootfs / path[1:]
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.readlink(path))
    (bundle / "config.json").write_text(json.dumps(container_config(id, limits), indent=1))


def container_config(id: str, limits: Confinement) -> dict[str, Any]:
    uid = 0 if limits.uid is None else limits.uid
    none: list[str] = []
    paths = [INSIDE, f"{INSIDE}/pilotlight/functions/sdk"]
    code = (
        f"import sys; sys.path += {paths!r}; import brokered_sockets; brokered_sockets.install(); "
        "from pilotlight.functions.sandbox.zygotes.zygote_main import contained; contained()"
    )
    total = (limits.memory_mib * limits.isolates + limits.disk_mib + ZYGOTE_MIB) << 20
    denied = [name for name in tiers.DENIED if name not in NO_MEANS]
    return {
        "ociVersion": "1.0.2",
        "hostname": "function",
        "root": {"path": "rootfs", "readonly": True},
        "process": {
            "terminal": False,
            "user": {"uid": uid, "gid": uid},
            "cwd": "/",
            "args": [_interpreter(), "-I", "-S", "-X", "utf8", "-B", "-c", code],
            "env": ["LANG=C.UTF-8", "MALLOC_ARENA_MAX=2", f"TZ={os.environ.get('TZ', 'UTC')}"],
            "capabilities": dict.fromkeys(("bounding", "effective", "inheritable", "permitted", "ambient"), none),
            "noNewPrivileges": True,
        },
        "mounts": [*_mounts(limits)],
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "cgroupsPath": f"/pilotlight/{id}",
            "resources": {
                "devices": [{"allow": False, "access": "rwm"}],
                "memory": {"limit": total},
                "pids": {"limit": limits.threads * limits.isolates + 1},
            },
            "seccomp": {
                "defaultAction": "SCMP_ACT_ALLOW",
                "syscalls": [{"names": denied, "action": "SCMP_ACT_ERRNO"}],
            },
            "maskedPaths": [*HIDDEN],
            "readonlyPaths": [*READ_ONLY],
        },
    }


def _mounts(limits: Confinement) -> Iterator[dict[str, Any]]:
    yield {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]}
    dev = ["nosuid", "noexec", "strictatime", "mode=755", "size=64k"]
    yield {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": dev}
    scratch = ["nosuid", "nodev", "mode=1777", f"size={limits.disk_mib}m", f"nr_inodes={1024 + 64 * limits.disk_mib}"]
    yield {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": scratch}
    same = tiers.top_most([*tiers.interpreter(), _interpreter(), *tiers.opened(limits)])
    for source, target in (*((path, path) for path in same), *_ours()):
        options = ["bind", "ro", "nosuid", "nodev"]
        yield {"destination": target, "type": "bind", "source": source, "options": options}


def _ours() -> Iterable[tuple[str, str]]:
    """Yield (source, path in the container) of the project's files that an isolate needs, and no others."""
    spec = find_spec("msgspec")
    assert spec is not None
    assert spec.origin is not None
    yield os.path.dirname(spec.origin), f"{INSIDE}/msgspec"
    for name in (
        "__init__.py",
        *(f"functions/{name}" for name in ("__init__.py", "channel", "sandbox", "sdk")),
        *(f"wire/{name}" for name in ("__init__.py", "paths.py")),
    ):
        yield str(ROOT / "pilotlight" / name), f"{INSIDE}/pilotlight/{name}"


def _interpreter() -> str:
    return os.path.realpath(sys.executable)
