"""Confinement that a process applies to itself before it runs a function's code, in three tiers.

Tier 1: resource limits, no privileges, only its own descriptors. Tier 2: also separate user, mount, process and network namespaces, a root directory
with only the interpreter, the libraries and the function's folder, Landlock, and a seccomp filter. Tier 3: filter, limits and Landlock (if the kernel
has it) in a container (oci.py). Runs once in the child, before any code of the function; a failure ends the child.
"""

import functools
import os
import resource
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from pilotlight.functions.sandbox.confinement import system
from pilotlight.functions.sandbox.confinement.confinement import Confinement

DENIED = (
    "socket", "connect", "bind", "execve", "execveat", "shmget", "semget", "msgget", "mq_open", "memfd_create", "memfd_secret", "ptrace",
    "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "open_tree",
    "move_mount", "fsopen", "fsconfig", "fsmount", "mount_setattr", "mknod", "mknodat", "name_to_handle_at", "open_by_handle_at", "add_key",
    "request_key", "keyctl", "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "fanotify_init",
    "init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "swapon", "swapoff", "acct", "quotactl",
    "syslog", "settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname", "iopl", "ioperm", "personality",
    "setsockopt", "vmsplice", "move_pages", "migrate_pages", "sched_setattr", "sched_setscheduler", "sched_setparam",
)  # fmt: skip
EXTRA_ADDRESS_SPACE = 1 << 30  # for mapped libraries, which do not count as the function's memory
SIGNALS = 1024  # pending signals and timers, whose kernel memory has no other limit
# certificate directories of `ssl`
AUTHORITIES = ("/etc/ssl/certs", "/etc/pki/tls", "/etc/pki/ca-trust", "/usr/share/ca-certificates")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/localtime")
NEW_ROOT = "/sys"  # where the new root is assembled; any directory works that has no function and no interpreter


def namespaces(limits: Confinement) -> int:
    """Return the clone flags for the namespaces of a function's zygote."""
    if limits.tier < 2:
        return 0
    flags = system.CLONE_NEWNS | system.CLONE_NEWPID | system.CLONE_NEWNET
    return flags if limits.uid is not None else flags | system.CLONE_NEWUSER


def confine(limits: Confinement) -> int:
    """Confine this process; return the listener for its fork requests, -1 at tier 1.
    The function's code must not keep the listener. Raises OSError if the machine does not allow the tier."""
    os.umask(0o022)  # the function must be able to read the directories made below
    readable = [*interpreter(), limits.folder, *limits.layers]
    if limits.tier >= 3:
        return _confine_contained(limits, readable)
    if limits.tier >= 2:
        prepare_root(namespaces(limits))
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        _complete_root([*opened(limits)], limits.disk_mib, limits.folder)
    elif limits.uid is not None:
        reveal([*interpreter(), *opened(limits), limits.scratch])
        # `opened` leaves out an empty folder that the function's user cannot read.
        os.makedirs(limits.folder, exist_ok=True)
    set_limits(limits)
    if limits.uid is not None:
        os.setgroups([])
        os.setresgid(limits.uid, limits.uid, limits.uid)
        os.setresuid(limits.uid, limits.uid, limits.uid)
    if limits.tier >= 2:
        system.prctl(system.PR_SET_DUMPABLE, 1)  # otherwise root owns /proc/self/uid_map
        if limits.uid is not None:
            system.unshare(system.CLONE_NEWUSER)
            _map_users(proc, limits.uid, limits.uid)
        os.close(proc)
    system.drop_capabilities()
    system.prctl(system.PR_SET_NO_NEW_PRIVS)
    os.chdir(limits.folder)
    if limits.tier >= 2:
        system.landlock([path for path in readable if os.path.exists(path)], ["/tmp", "/dev/null"])
    os.environ.update(HOME=_scratch(limits), TMPDIR=_scratch(limits))
    return system.seccomp(DENIED, asks=True) if limits.tier >= 2 else -1


def _confine_contained(limits: Confinement, readable: list[str]) -> int:
    """Confine this process in a container, which already has its own root, user, processes and network."""
    set_limits(limits)
    system.prctl(system.PR_SET_NO_NEW_PRIVS)
    os.chdir(limits.folder)
    if system.landlock_abi():
        system.landlock([path for path in readable if os.path.exists(path)], ["/tmp", "/dev/null"])
    os.environ.update(HOME="/tmp", TMPDIR="/tmp")
    return system.seccomp(DENIED, asks=True)


def confine_copy(limits: Confinement) -> None:
    """Forbid an isolate, forked from the confined zygote, to start processes."""
    if limits.tier >= 2:
        system.seccomp((), asks=False)


def prepare() -> None:
    """Compute the results that all functions share; called once, in the site's zygote."""
    interpreter_root()
    for denied, asks in ((DENIED, True), ((), False)):
        with suppress(OSError):  # `confine` raises it again, at the tiers that need the filter
            system.seccomp_filter(denied, asks=asks)


@functools.cache  # sysconfig takes 4 ms
def interpreter() -> tuple[str, ...]:
    """Return the paths that Python needs to read."""
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib")}
    told = [os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ]
    sdk = str(Path(__file__).parents[2] / "sdk")
    return (*sorted(os.path.realpath(path) for path in paths), *LIBRARIES, *AUTHORITIES, *told, sdk)


@functools.cache  # makes 100 system calls
def interpreter_root() -> tuple[list[str], list[tuple[str, str]]]:
    """Return the directories of `interpreter`, and its symbolic links with their targets."""
    return [*top_most(interpreter())], [*_links(interpreter())]


def opened(limits: Confinement) -> Iterator[str]:
    """Yield a function's folder and layers.
    A directory that the function's user cannot read, such as root's home (mode 0700), is replaced by its entries."""
    paths = [os.path.realpath(path) for path in (limits.folder, *limits.layers)]
    closed = [
        path for path in paths if limits.uid is not None and os.path.isdir(path) and os.stat(path).st_mode & 5 != 5
    ]
    for path in paths:
        inside = [entry.path for entry in os.scandir(path)] if path in closed else [path]
        yield from sorted(each for each in inside if each not in closed)


def _scratch(limits: Confinement) -> str:
    return "/tmp" if limits.tier >= 2 else limits.scratch


def set_limits(limits: Confinement) -> None:
    for which, value in resource_limits(limits).items():
        resource.setrlimit(which, (value, value))


def resource_limits(limits: Confinement) -> dict[int, int]:
    """Return the limits of setrlimit(2), by resource."""
    memory, disk = limits.memory_mib << 20, limits.disk_mib << 20
    wanted = {
        # private writable memory; above it Python raises MemoryError at a line of the code
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_AS: memory + EXTRA_ADDRESS_SPACE,
        resource.RLIMIT_FSIZE: disk,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: SIGNALS,
    }
    if limits.uid is not None or limits.tier >= 2:  # else the limit would count the site's other processes
        wanted[resource.RLIMIT_NPROC] = limits.threads
    return wanted


def _map_users(proc: int, uid: int, gid: int) -> None:
    """Map the user and group ids to the same numbers in the user namespace, and no others."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        file = os.open(f"self/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)


@functools.cache
def prepare_root(flags: int) -> None:
    """Prepare this process's new root directory, with the interpreter, unless that is done already.

    A process that is forked ahead calls it before its function is known, which takes a millisecond off that function's start. `flags` are those of
    `namespaces`. Raises OSError.
    """
    os.umask(0o022)  # the function must be able to read the directories
    if flags & system.CLONE_NEWUSER:
        proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        _map_users(proc, os.getuid(), os.getgid())
        os.close(proc)
    directories, links = interpreter_root()
    system.mount("none", "/", "", system.MS_REC | system.MS_PRIVATE)
    system.mount("none", NEW_ROOT, "tmpfs", system.MS_NOSUID | system.MS_NODEV, "mode=755")
    _show(directories)
    _bind(os.open("/dev/null", os.O_PATH | os.O_CLOEXEC), NEW_ROOT + "/dev/null", 0)
    _link(links)
    os.makedirs(NEW_ROOT + "/tmp", exist_ok=True)
    os.chmod(NEW_ROOT + "/tmp", 0o1777)


def _complete_root(functions: list[str], disk_mib: int, folder: str) -> None:
    """Add the paths `functions` to the new root directory, limit its size, and enter it."""
    directories, _ = interpreter_root()
    options = f"size={disk_mib}m,nr_inodes={1024 + 64 * disk_mib}"
    system.mount("none", NEW_ROOT, "tmpfs", system.MS_REMOUNT | system.MS_NOSUID | system.MS_NODEV, options)
    _show([path for path in _outermost({*directories, *top_most(functions)}) if path not in directories])
    _link(_links(functions))
    # `opened` leaves out an empty folder that the function's user cannot read.
    os.makedirs(NEW_ROOT + folder, exist_ok=True)
    os.chdir(NEW_ROOT)
    system.pivot_root_here()
    os.chdir("/")


def _show(paths: Iterable[str]) -> None:
    for path in paths:
        source = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _bind(source, NEW_ROOT + path, system.MS_RDONLY | system.MS_NOSUID | system.MS_NODEV)


def _link(links: Iterable[tuple[str, str]]) -> None:
    for path, target in links:
        if not os.path.lexists(NEW_ROOT + path):
            os.makedirs(os.path.dirname(NEW_ROOT + path), exist_ok=True)
            os.symlink(target, NEW_ROOT + path)


def reveal(needed: Iterable[str]) -> None:
    """Make the needed paths reachable for the users of functions.

    If a directory above a needed path is closed to other users (an interpreter in /root), a private mount covers it, for this process, with a
    directory that has only the needed entries. If no directory is closed, no namespace is created.
    """
    closed = closed_above(needed)
    if not closed:
        return
    system.unshare(system.CLONE_NEWNS)
    system.mount("none", "/", "", system.MS_REC | system.MS_PRIVATE)
    for hidden, paths in closed.items():
        sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in paths]
        system.mount("none", hidden, "tmpfs", system.MS_NOSUID | system.MS_NODEV, "size=1m,mode=755")
        for path, source in sources:
            _bind(source, path, 0)


def closed_above(needed: Iterable[str]) -> dict[str, list[str]]:
    """Return the outermost directories that are closed to other users, with the needed paths inside."""
    closed: dict[str, list[str]] = {}
    for path in top_most(needed):
        for parent in [*reversed(Path(path).parents)]:
            if not parent.stat().st_mode & 0o001:
                closed.setdefault(str(parent), []).append(path)
                break
    return closed


def _bind(source: int, target: str, flags: int) -> None:
    """Mount the file or directory `source`, a descriptor, at `target`; close `source`."""
    if os.path.isdir(f"/proc/self/fd/{source}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
    system.mount(f"/proc/self/fd/{source}", target, "", system.MS_BIND | system.MS_REC)
    if flags:
        system.mount("none", target, "", system.MS_BIND | system.MS_REMOUNT | flags)
    os.close(source)


def top_most(paths: Iterable[str]) -> Iterator[str]:
    """Yield the real paths of `paths`, without those that do not exist or are inside another of them."""
    return _outermost({os.path.realpath(path) for path in paths if os.path.exists(path)})


def _links(paths: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((path, os.readlink(path)) for path in paths if os.path.islink(path))


def _outermost(paths: set[str]) -> Iterator[str]:
    kept: list[str] = []
    for path in sorted(paths, key=len):
        if not any(path == other or path.startswith(other.rstrip("/") + "/") for other in kept):
            kept.append(path)
    return iter(kept)
