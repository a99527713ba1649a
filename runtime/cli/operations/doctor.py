"""`pilotlight doctor`: find problems of this machine that would stop a site, and how to fix them.

It changes nothing."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console

from pilotlight.runtime.cli.operations.state_roots import StateRoot
from pilotlight.runtime.hosts.gpus import installed_gpus
from pilotlight.sites.config import ListenConfig

GIB = 1 << 30
LEAST_FILES = 4096
LEAST_SHM = GIB
LEAST_DISK = 5 * GIB
CLONE_NEWUSER = 0x10000000  # from sched.h
NTP_WITHIN_S = 2.0
NTP_PORT = 123
NTP_EPOCH_S = 2_208_988_800  # seconds from 1900 to 1970 (RFC 5905)
CLOCK_MAY_DIFFER_S = 20.0  # maximum difference from the time server; signatures are valid for 60 s

State = Literal["ok", "note", "wrong"]


class Finding(NamedTuple):
    state: State
    what: str
    mend: str = ""


def doctor(
    listens: Sequence[ListenConfig], roots: Sequence[StateRoot], time_server: str | None, console: Console | None = None
) -> bool:
    """Print all findings; return whether none is a problem.

    `time_server` is an NTP server to compare the clock with; None skips the check.
    """
    console = console or Console()
    signs = {"ok": "[green]ok[/]   ", "note": "[yellow]note[/] ", "wrong": "[red]wrong[/]"}
    found = list(findings(listens, roots, time_server))
    for finding in found:
        console.print(f"{signs[finding.state]} {finding.what}", highlight=False, soft_wrap=True)
        if finding.mend:
            console.print(f"      {finding.mend}", highlight=False, soft_wrap=True)
    return not any(finding.state == "wrong" for finding in found)


def findings(listens: Sequence[ListenConfig], roots: Sequence[StateRoot], time_server: str | None) -> Iterator[Finding]:
    """Yield the result of each check."""
    yield _python()
    yield _torch()
    yield _kernels()
    yield _gpu()
    yield shared_memory(os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield user_namespaces(_can_unshare)
    for listen in listens:
        yield port(listen.host, listen.port)
    for root in roots:
        yield disk(root)
    if time_server is not None:
        yield clock(clock_ahead_s(time_server), time_server)


def _python() -> Finding:
    return Finding("ok", f"Python {sys.version.partition(' ')[0]}")


def _torch() -> Finding:
    try:
        found = version("torch")
    except PackageNotFoundError:
        sentence = "models need it: pip install 'torch>=2.11,<2.14' --index-url https://download.pytorch.org/whl/cpu"
        return Finding("wrong", "torch is not installed", f"{sentence}, without the index on a GPU's machine")
    if "+cpu" in found and installed_gpus():
        return Finding("wrong", f"torch {found} cannot use this machine's GPU", "install torch without +cpu")
    return Finding("ok", f"torch {found}")


def _kernels() -> Finding:
    """Look for the compiled CPU kernels.
    It uses another process, because a runtime does not import kernels."""
    code = "from pilotlight.kernels.cpu.build import LibraryBuild; print(LibraryBuild().find() or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2].rpartition("BuildError: ")[2]
        return Finding("note", "the CPU kernels cannot be compiled: CPUs compute with torch, more slowly", why)
    if not done.stdout.strip():
        mend = "the first site compiles them, or run `python -m pilotlight.kernels.cpu.build`"
        return Finding("note", "the CPU kernels are not compiled yet", mend)
    return Finding("ok", "the CPU kernels are compiled")


def _gpu() -> Finding:
    gpus = installed_gpus()
    if gpus:
        return Finding("ok", f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}")
    if shutil.which("lspci") is not None:
        listed = subprocess.run(["lspci"], capture_output=True, text=True, check=False).stdout
        if "NVIDIA" in listed and not os.path.exists("/proc/driver/nvidia/version"):
            return Finding("wrong", "there is an NVIDIA device but no driver", "install NVIDIA's driver, and reboot")
    return Finding("ok", "no GPU: models are computed on the CPU")


def shared_memory(found: os.statvfs_result | None) -> Finding:
    if found is None:
        return Finding("wrong", "there is no /dev/shm", "mount -t tmpfs tmpfs /dev/shm")
    size = found.f_blocks * found.f_frsize
    if size < LEAST_SHM:
        sentence = "it holds sleeping weights and KV blocks: use docker run --shm-size 8g, or mount -o remount,size=50% /dev/shm"
        return Finding("wrong", f"/dev/shm has {size / 2**20:.0f} MiB", sentence)
    return Finding("ok", f"/dev/shm has {size / GIB:.1f} GiB, {found.f_bavail * found.f_frsize / GIB:.1f} of them free")


def open_files(hard_limit: int) -> Finding:
    if hard_limit != resource.RLIM_INFINITY and hard_limit < LEAST_FILES:
        sentence = "each client and each response of a site needs one: LimitNOFILE=1048576 in the unit, or limits.conf"
        return Finding("wrong", f"a process may open {hard_limit} files", sentence)
    shown = "any number of" if hard_limit == resource.RLIM_INFINITY else hard_limit
    return Finding("ok", f"a process may open {shown} files")


def user_namespaces(try_it: Callable[[], str]) -> Finding:
    """Check whether user namespaces are available. `try_it` returns why they are not, or ""."""
    if not (why := try_it()):
        return Finding("ok", "functions can be isolated in namespaces (tier 2)")
    sentence = (
        "sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=15000; on Ubuntu also kernel.apparmor_restrict_unprivileged_userns=0; "
        "in a container, a seccomp profile that allows unshare"
    )
    return Finding("note", f"functions get isolation of tier 1 alone: {why}", sentence)


def _can_unshare() -> str:
    code = (
        "import ctypes, os, sys\n"
        f"if ctypes.CDLL(None, use_errno=True).unshare({CLONE_NEWUSER}): sys.exit(os.strerror(ctypes.get_errno()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stderr.strip()


def port(host: str, number: int) -> Finding:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
        except PermissionError:
            sentence = "AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit, or a port above 1023"
            return Finding("wrong", f"port {number} on {host} needs privileges", sentence)
        except OSError as error:
            sentence = f"`ss -ltnp 'sport = :{number}'` shows its user, which may be a running Pilotlight"
            return Finding("note", f"port {number} on {host} cannot be had: {error.strerror}", sentence)
    return Finding("ok", f"port {number} on {host} is free")


def disk(root: StateRoot, least: int = LEAST_DISK, may: Callable[[Path, int], bool] = os.access) -> Finding:
    """Check the directory of a state root, or the parent where it will be created.

    At least `least` bytes must be free. `may` tells whether a path may be used in a mode of access(2)."""
    there = next(path for path in (root.path, *root.path.parents) if path.exists())
    if not may(there, os.W_OK):
        return Finding(
            "wrong", f"{root.path} cannot be written ({root.name})", f"chown {there}, or name another directory"
        )
    free = shutil.disk_usage(there).free
    if free < least:
        return Finding(
            "wrong", f"{root.path} has {free / GIB:.1f} GiB free ({root.name})", "make room, or name another directory"
        )
    return Finding("ok", f"{root.path} has {free / GIB:.0f} GiB free ({root.name})")


def clock(ahead_s: float | None, server: str) -> Finding:
    if ahead_s is None:
        return Finding("note", f"the clock could not be compared: {server} does not answer", "another --time-server")
    if abs(ahead_s) > CLOCK_MAY_DIFFER_S:
        sentence = "sites refuse hops that are a minute off: run chrony or systemd-timesyncd"
        return Finding("wrong", f"the clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}", sentence)
    return Finding("ok", f"the clock is within {abs(ahead_s):.2f} s of {server}'s")


def clock_ahead_s(server: str, port: int = NTP_PORT) -> float | None:
    """Return the clock's lead in seconds by SNTP (RFC 5905); None without a response.
    The last 8 of the response's 48 bytes are the server's transmit time."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            asking.settimeout(NTP_WITHIN_S)
            asking.connect((server, port))
            before = time.time()
            asking.send(b"\x23" + bytes(47))  # version 4, mode client
            answer = asking.recv(48)
    except OSError:
        return None
    if len(answer) < 48:
        return None
    seconds, fraction = int.from_bytes(answer[40:44], "big"), int.from_bytes(answer[44:48], "big")
    return (before + time.time()) / 2 - (seconds - NTP_EPOCH_S + fraction / 2**32)
