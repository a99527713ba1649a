"""Linux system calls that Python lacks: clone, mounts, capabilities, Landlock, seccomp.

This module calls them through ctypes, in 200 lines, instead of using three dependencies. Each function raises OSError with the call's name.
"""

import ctypes
import fcntl
import functools
import os
import platform
import signal
import struct
import sys
import termios
from collections.abc import Iterable
from contextlib import suppress

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
CLONE_PARENT, CLONE_THREAD = 0x00008000, 0x00010000
CLONE_ANY_NAMESPACE = 0x7E020000  # all CLONE_NEW* flags of clone
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
PR_SET_NO_NEW_PRIVS = 38
LAST_CAPABILITY = 40

# System call numbers: x86_64 from arch/x86/entry/syscalls/syscall_64.tbl, aarch64 from include/uapi/asm-generic/unistd.h.
_NUMBERS = {
    "x86_64": {
        "setsockopt": 54, "fcntl": 72, "vmsplice": 278, "seccomp": 317,
        "socket": 41, "connect": 42, "bind": 49, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "shmget": 29, "semget": 64, "msgget": 68,
        "ptrace": 101, "syslog": 103, "personality": 135, "mknod": 133, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163,
        "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
        "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "clock_settime": 227,
        "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "mq_open": 240, "mknodat": 259, "unshare": 272,
        "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319, "kexec_file_load": 320,
        "bpf": 321, "execveat": 322, "userfaultfd": 323, "move_pages": 279, "migrate_pages": 256,
        "sched_setparam": 142, "sched_setscheduler": 144, "sched_setattr": 314,
    },
    "aarch64": {
        "setsockopt": 208, "fcntl": 25, "vmsplice": 75, "seccomp": 277,
        "socket": 198, "connect": 203, "bind": 200, "clone": 220, "execve": 221, "shmget": 194, "semget": 190, "msgget": 186, "ptrace": 117,
        "syslog": 116, "personality": 92, "pivot_root": 41, "adjtimex": 171, "chroot": 51, "acct": 89, "settimeofday": 170, "mount": 40,
        "umount2": 39, "swapon": 224, "swapoff": 225, "reboot": 142, "sethostname": 161, "setdomainname": 162, "init_module": 105,
        "delete_module": 106, "quotactl": 60, "clock_settime": 112, "kexec_load": 104, "add_key": 217, "request_key": 218, "keyctl": 219,
        "mq_open": 180, "mknodat": 33, "unshare": 97, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "finit_module": 273, "memfd_create": 279, "kexec_file_load": 294, "bpf": 280, "execveat": 281, "userfaultfd": 282, "move_pages": 239,
        "migrate_pages": 238, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setattr": 274,
    },
}  # fmt: skip
_SAME_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
    "fsmount": 432, "clone3": 435, "pidfd_getfd": 438, "mount_setattr": 442, "landlock_create_ruleset": 444, "landlock_add_rule": 445,
    "landlock_restrict_self": 446, "memfd_secret": 447,
}  # fmt: skip
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the GIL during a call; a fork must not lose it
_libc.syscall.restype = ctypes.c_long


def number(name: str) -> int | None:
    """Return the number of a system call on this machine; None if it does not exist here."""
    return _SAME_EVERYWHERE.get(name) or _NUMBERS.get(platform.machine(), {}).get(name)


def clone(flags: int) -> int:
    """Fork into new namespaces; return 0 in the child, as os.fork() does.
    unshare would need a second process for a pid namespace, which costs 1 ms."""
    if not flags:
        return os.fork()
    python = ctypes.pythonapi
    python.PyOS_BeforeFork()
    pid = int(_libc.syscall(number("clone"), ctypes.c_ulong(flags | signal.SIGCHLD), 0, 0, 0, 0))
    code = ctypes.get_errno()
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(code, f"clone: {os.strerror(code)}")
    return pid


def unshare(flags: int) -> None:
    _checked("unshare", _libc.unshare(flags))


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(f"mount {target}", result)


def pivot_root_here() -> None:
    """Make the current directory, a mount point, the root; detach the old root."""
    _checked("pivot_root", _libc.syscall(number("pivot_root"), b".", b"."))
    _checked("umount2", _libc.umount2(b".", MNT_DETACH))


def prctl(option: int, argument: int = 1, second: object = 0) -> None:
    result = _libc.prctl(option, ctypes.c_ulong(argument), second, 0, 0)
    _checked(f"prctl({option})", result)


def give_up_terminal() -> None:
    """Leave the controlling terminal, if there is one.
    Neither this process nor its children can get another, because it leads no session."""
    with suppress(OSError), open("/dev/tty", "rb") as terminal:
        fcntl.ioctl(terminal, termios.TIOCNOTTY)


def drop_capabilities() -> None:
    """Drop all capabilities permanently, also from the bounding set if permitted."""
    for capability in range(LAST_CAPABILITY + 1):
        _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    header, nothing = struct.pack("II", 0x20080522, 0), bytes(24)  # _LINUX_CAPABILITY_VERSION_3
    _checked("capset", _libc.capset(header, nothing))


def set_slice(pid: int, nice: int, slice_ns: int) -> None:
    """Set a thread's nice value and time slice in ns (0: the default).
    A thread with a shorter slice is scheduled sooner after it wakes. Not inherited."""
    attr = struct.pack("=IIQiIQQQII", 56, os.SCHED_OTHER, _SCHED_FLAG_RESET_ON_FORK, nice, 0, slice_ns, 0, 0, 0, 0)
    _checked("sched_setattr", _libc.syscall(number("sched_setattr"), pid, attr, 0))


_SCHED_FLAG_RESET_ON_FORK = 1


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1, 2, 4, 8, 1 << 14
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _EXECUTE | _READ_FILE | _READ_DIR  # execute is needed to map shared libraries


def landlock_abi() -> int:
    """Return the version of Landlock's ABI; 0 if this kernel has none or it is disabled."""
    return max(0, int(_libc.syscall(number("landlock_create_ruleset"), None, ctypes.c_size_t(0), 1)))


def landlock(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process's access to files to these paths.
    From ABI 4 on, TCP is forbidden, too; from ABI 6 on, also abstract Unix sockets and signals to processes outside."""
    abi = landlock_abi()
    if not abi:
        raise OSError(f"landlock: {os.strerror(38)}")
    everything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attr = _RulesetAttr(everything, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = ctypes.c_size_t(8 if abi < 4 else 16 if abi < 6 else 24)
    ruleset = _libc.syscall(number("landlock_create_ruleset"), ctypes.byref(attr), size, 0)
    _checked("landlock_create_ruleset", ruleset)
    try:
        for paths, rights in ((readable, _READ), (writable, everything & ~_EXECUTE)):
            for path in paths:
                _allow(ruleset, path, rights & everything)
        _checked("landlock_restrict_self", _libc.syscall(number("landlock_restrict_self"), ruleset, 0))
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            rights &= _ON_FILES
        rule = _PathBeneath(rights, parent)
        _checked(
            f"landlock_add_rule {path}",
            _libc.syscall(number("landlock_add_rule"), ruleset, 1, ctypes.byref(rule), 0),
        )
    finally:
        os.close(parent)


_LOAD, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_EPERM, _EACCES, _ENOSYS = 1, 13, 38
_SET_MODE_FILTER, _NEW_LISTENER, _CONTINUE = 1, 8, 1
_NOTIF_RECV, _NOTIF_SEND = 0xC0502100, 0xC0182101
_DATA_NR, _DATA_ARCH, _DATA_ARG0, _DATA_ARG1 = 0, 4, 16, 24
_F_SETPIPE_SZ = 1031


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def seccomp(denied: Iterable[str], *, asks: bool) -> int:
    """Install a system call filter; return the descriptor of its listener, or 0 without `asks`.

    The denied calls, new namespaces, larger pipes and new processes fail with EPERM, sockets with EACCES; threads are allowed. With `asks`, each fork
    waits until another process allows it through the listener (`asked`, `answer`). clone3 fails with ENOSYS, because a filter cannot inspect its
    flags; the C library then uses clone.
    """
    raw = seccomp_filter(tuple(denied), asks=asks)
    buffer = ctypes.create_string_buffer(raw, len(raw))
    program = _Program(len(raw) // _OP_BYTES, ctypes.cast(buffer, ctypes.c_void_p))
    flags = _NEW_LISTENER if asks else 0
    result = int(_libc.syscall(_need("seccomp"), _SET_MODE_FILTER, flags, ctypes.byref(program)))
    _checked("seccomp", result)
    return result


@functools.cache  # takes 0.4 ms in a process that was just forked
def seccomp_filter(denied: tuple[str, ...], *, asks: bool) -> bytes:
    """Return the instructions of `seccomp`. Raises OSError if the machine's system calls are unknown."""
    machine = platform.machine()
    if machine not in _AUDIT_ARCH:
        raise OSError(_ENOSYS, f"seccomp: no table of system calls for {machine}")
    forks = _ASK if asks else _ERRNO | _EPERM
    code = [
        _op(_LOAD, _DATA_ARCH), _op(_JUMP_EQUAL, _AUDIT_ARCH[machine], 1, 0), _op(_RETURN, _KILL),
        _op(_LOAD, _DATA_NR), _op(_JUMP_AT_LEAST, 0x40000000, 0, 1), _op(_RETURN, _KILL),  # numbers of the x32 ABI
    ]  # fmt: skip
    code += _deny(number("clone3"), _ENOSYS)
    for name in denied:
        code += _deny(number(name), _EACCES if name in ("socket", "connect", "bind") else _EPERM)
    for name in ("fork", "vfork"):
        if (call := number(name)) is not None:
            code += [_op(_JUMP_EQUAL, call, 0, 1), _op(_RETURN, forks)]
    code += [_op(_JUMP_EQUAL, _need("fcntl"), 0, 4), _op(_LOAD, _DATA_ARG1), _op(_JUMP_EQUAL, _F_SETPIPE_SZ, 0, 1)]
    code += [_op(_RETURN, _ERRNO | _EPERM), _op(_RETURN, _ALLOW)]
    code += [_op(_JUMP_EQUAL, _need("clone"), 0, 5), _op(_LOAD, _DATA_ARG0)]
    code += [_op(_JUMP_ANY_BIT, CLONE_ANY_NAMESPACE | CLONE_PARENT, 0, 1), _op(_RETURN, _ERRNO | _EPERM)]
    code += [_op(_JUMP_ANY_BIT, CLONE_THREAD, 1, 0), _op(_RETURN, forks), _op(_RETURN, _ALLOW)]
    return b"".join(code)


def asked(listener: int) -> int:
    """Return the id of a fork that waits for permission. Raises OSError if the process is gone."""
    question = bytearray(80)  # struct seccomp_notif
    fcntl.ioctl(listener, _NOTIF_RECV, question, True)
    return int.from_bytes(question[:8], sys.byteorder)


def answer(listener: int, id: int, is_allowed: bool) -> None:
    reply = struct.pack("=QqiI", id, 0, 0 if is_allowed else -_EPERM, _CONTINUE if is_allowed else 0)
    with suppress(OSError):  # the process is gone
        fcntl.ioctl(listener, _NOTIF_SEND, bytearray(reply), True)


def _deny(call: int | None, code: int) -> list[bytes]:
    return [] if call is None else [_op(_JUMP_EQUAL, call, 0, 1), _op(_RETURN, _ERRNO | code)]


def _need(name: str) -> int:
    found = number(name)
    assert found is not None
    return found


_OP_BYTES = 8  # struct sock_filter


def _op(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, k)


def _checked(what: str, result: int) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
