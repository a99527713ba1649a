"""Compiles the C files beside this one for the machine it runs on, once, into the user's cache.

`python -m pilotlight.kernels.cpu.build` does so with a line of progress, before anything needs the library: a site that finds none computes by
torch meanwhile.
Knows compilers, flags and files; refuses to know what the library computes. Whatever goes wrong is a BuildError that says what to change.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pilotlight.kernels.cpu import durable
from pilotlight.kernels.cpu.shipped import levels

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
# For Zen 1 to 3 GCC makes fused products of some loops and not of others, and a row's bits would depend on how many rows it is computed with.
_ALWAYS_FUSED = "--param=avoid-fma-max-bits=0"
_FLAGS = [
    "-O3",
    "-std=gnu11",
    "-pthread",
    "-fPIC",
    "-fno-math-errno",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
    _ALWAYS_FUSED,
]
_SCRATCH = ".build"  # ending of the folder that a build works in
_TIMEOUT_S = 600  # for one file; all take 17 s on two cores
_MOST_COMPILERS = 8  # at once: a container may see more cores than it may use, and each compiler takes some 150 MiB
# Every C file is compiled for fp32 and for bf16: the same algorithm, the same names with another ending.
_SCALARS = {"f32": [], "bf16": ["-DSCALAR_BF16"]}

SWITCH = "PILOTLIGHT_CPU"  # a kind of CPU that the library is built for, in place of this machine's own; torch: it is not used at all
TORCH = "torch"


class _CpuKind(NamedTuple):
    flags: tuple[str, ...]
    needs: str  # as /proc/cpuinfo has it


# What a CPU has besides decides which calls are measured against torch's library: where there are matrix units, bf16 products and attention of
# prompts (gemm.c). Tiles are computed in plain C where that kind is forced (tiles.h), so that both can be had wherever the rest runs.
_KINDS = {
    "avx2": _CpuKind(("-march=x86-64-v3",), "avx2"),
    "avx512": _CpuKind(("-march=x86-64-v4",), "avx512vl"),
    "avx512vnni": _CpuKind(("-march=x86-64-v4", "-mavx512vnni"), "avx512_vnni"),  # Cascade and Ice Lake
    "avx512bf16": _CpuKind(("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), "avx512_bf16"),  # Zen 4 and 5
    "amx": _CpuKind(("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-DSOFTWARE_TILES"), "avx512_bf16"),
}
KINDS = (*_KINDS, TORCH)

Progress = Callable[[int, int], None]  # (files that are compiled, all files)


class BuildError(Exception):
    """There is no library; the sentence says why."""


def forced_kind() -> str | None:
    """Return the kind of CPU that PILOTLIGHT_CPU names; None: this machine's own. Raises BuildError for one that is unknown or cannot run here."""
    name = os.environ.get(SWITCH)
    if not name or name == TORCH:
        return name or None
    kind = _KINDS.get(name)
    if kind is None:
        raise BuildError(f"{SWITCH}={name} is no kind of CPU: say {', '.join(KINDS[:-1])} or {TORCH}, or nothing")
    if kind.needs not in _processor().split():
        raise BuildError(f"{SWITCH}={name} needs a CPU with {kind.needs}, which this machine's is not; unset it")
    return name


def find_library() -> Path | None:
    """Return the library that came with the package or, where none did, that an earlier build left for this machine and these sources. A damaged one,
    which would end its callers, is removed."""
    kind = forced_kind()
    if kind == TORCH:
        return None
    if kind is None and (path := levels.find(_processor())) is not None:
        return path
    return _find(private_cache("kernels"), _key(_compiler()))


def build_library(progress: Progress = lambda *_: None) -> Path:
    """Find or build the library. Of several processes one compiles, the others wait. Raises BuildError.

    At the priority of everything else, since what serves meanwhile computes by torch: at the lowest, a site busy from its first minute had
    no library for 112 s, and steps of 850 ms in place of 95."""
    if forced_kind() is None and (path := levels.find(_processor())) is not None:
        return path
    compiler = _compiler()
    folder, key = private_cache("kernels"), _key(compiler)
    if (path := _find(folder, key)) is not None:
        return path
    with open(folder / f"{key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (path := _find(folder, key)) is None:
            _remove_abandoned(folder)
            scratch = folder / f"{key}{_SCRATCH}"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            log.info("compiling the CPU kernels for this machine, which is done once")
            began = time.monotonic()
            try:
                compiled = _compile(compiler, scratch, progress, _tuning())
                path = folder / f"{key}-{_digest(compiled)}.so"
                durable.replace(compiled, path)
            finally:
                shutil.rmtree(scratch)
            log.info("compiled the CPU kernels in %.0f s", time.monotonic() - began)
    return path


def _remove_abandoned(folder: Path) -> None:
    """Remove what compilers that were killed have left: scratch folders of builds whose lock no process holds."""
    for scratch in folder.glob(f"*{_SCRATCH}"):
        with open(scratch.with_suffix(".lock"), "w") as lock, suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(scratch, ignore_errors=True)


def discard_libraries() -> None:
    """Remove all libraries, of every machine: one of them may be what ends its processes."""
    for path in private_cache("kernels").glob("*.so"):
        path.unlink(missing_ok=True)
        log.warning("removed %s; it is built again", path)


def _find(folder: Path, key: str) -> Path | None:
    for path in folder.glob(f"{key}-*.so"):
        with suppress(FileNotFoundError):
            if path.stem == f"{key}-{_digest(path)}":
                return path
            log.warning(
                "the CPU kernels in %s are damaged: their digest is not in their name; they are built again", path
            )
            path.unlink()
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def build_level(level: levels.Level, folder: Path) -> Path:
    """Compile the library of a level into a folder, for a wheel; return it. Raises BuildError."""
    scratch = folder / f".{level.name}{_SCRATCH}"
    scratch.mkdir(parents=True)
    try:
        compiled = _compile(_compiler(), scratch, lambda *_: None, level.flags)
        path = folder / f"{levels.name_of(level, compiled)}.so"
        durable.replace(compiled, path)
    finally:
        shutil.rmtree(scratch)
    return path


def limits_file(library: Path) -> Path:
    """Return where it is kept what was measured with a library on this machine. Raises BuildError."""
    return private_cache("kernels") / f"{library.stem}.json"


def _compile(compiler: str, scratch: Path, progress: Progress, tuning: tuple[str, ...]) -> Path:
    """Compile each file for each scalar, several at once, the largest first: 17 s in place of 33 on two cores."""
    command = [compiler, *_FLAGS, *tuning]
    sources = sorted(SOURCES.glob("*.c"), key=lambda path: path.stat().st_size, reverse=True)
    for scalar in _SCALARS:
        (scratch / scalar).mkdir()
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_COMPILERS)) as pool:
        started = [
            pool.submit(_run, [*command, *defines, "-c", str(source)], scratch / scalar)
            for source in sources
            for scalar, defines in _SCALARS.items()
        ]
        progress(0, len(started))
        try:
            for compiled, future in enumerate(as_completed(started), 1):
                future.result()
                progress(compiled, len(started))
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    objects = [str(path) for scalar in _SCALARS for path in sorted((scratch / scalar).glob("*.o"))]
    _run([compiler, "-shared", "-pthread", "-o", "library.so", *objects, "-lm"], scratch)
    return scratch / "library.so"


def _run(command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C compiler could not be run: {error}") from error
    if done.returncode != 0:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
        raise BuildError(f"the C compiler failed: {said or 'it said nothing'} ({' '.join(command)[:200]})")


def _compiler() -> str:
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(f"there is no C compiler ({', '.join(names)}); install one, for example the package gcc")


def _tuning() -> tuple[str, ...]:
    first_level = f"-DLEVEL1_KIB={_level1_kib()}"
    if (kind := _KINDS.get(forced_kind() or "")) is not None:
        return (*kind.flags, first_level)
    return ("-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native", first_level)


def _level1_kib() -> int:
    """Return the size of a core's first-level cache for data; 32 where the system does not say."""
    try:
        return max(0, os.sysconf("SC_LEVEL1_DCACHE_SIZE")) >> 10 or 32
    except (ValueError, OSError):  # not a name of this system's
        return 32


def _key(compiler: str) -> str:
    """Return a name for these sources, compiler and processor: a home directory may be shared by different machines."""
    key = hashlib.sha256()
    for source in [*sorted(SOURCES.glob("*.c")), *sorted(SOURCES.glob("*.h"))]:
        key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    status = os.stat(compiler)
    key.update(
        repr(
            (_FLAGS, _tuning(), compiler, status.st_size, status.st_mtime_ns, platform.machine(), _processor())
        ).encode()
    )
    return key.hexdigest()[:32]


def _processor() -> str:
    """Return the lines of /proc/cpuinfo that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def private_cache(name: str) -> Path:
    """Return a folder of the user's cache, as `private_folder` does. Raises BuildError."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise BuildError(
            f"there is no home directory: {error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return private_folder(cache / "pilotlight" / name)


def private_folder(folder: Path) -> Path:
    """Return `folder`, made where it is missing. Raises BuildError if others can write to it: what lies in it is executed."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError as error:
        raise BuildError(
            f"{folder} cannot be used: {error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{folder} can be written by others; run chmod go-w on it, or set XDG_CACHE_HOME")
    if not os.access(folder, os.W_OK):
        raise BuildError(f"{folder} cannot be written; set XDG_CACHE_HOME to a folder that can be")
    return folder


def main() -> None:
    """Build the library where there is none, with a line of progress. Without a compiler say what follows from that, and succeed."""
    try:
        if forced_kind() == TORCH or find_library() is not None:
            return
        build_library(_show_progress)
    except BuildError as error:
        print(f"The CPU kernels cannot be compiled, torch computes instead, more slowly: {error}", file=sys.stderr)


def _show_progress(compiled: int, total: int) -> None:
    end = "\n" if compiled == total else "\r"
    if sys.stderr.isatty() or compiled in (0, total):
        line = f"Compiling the CPU kernels (the first time only): {compiled} of {total} files"
        print(line, end=end if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
