"""Compile the C files in this folder for this machine, once, into the user's cache.

`python -m pilotlight.kernels.cpu.build` does so ahead of time, with a line of progress; until the library exists, a site computes with torch. This
module knows compilers, flags and files, and is independent of what the library computes. Every failure is a BuildError that names what to change.
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
# Without this option GCC, tuning for Zen 1 to 3, fuses products and sums in some loops and not in others: a row's bits would depend on the number of
# rows computed with it.
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
_SCRATCH = ".build"  # suffix of the folder that a build works in
_UNUSED_S = 30 * 24 * 3600.0  # after its last use, a library for other sources or another machine is kept this long
_TIMEOUT_S = 600  # for compiling one file; all files together take 17 s on two cores
_LEVEL1_DCACHE_SIZE = 188  # glibc's _SC_LEVEL1_DCACHE_SIZE, for which os.sysconf has no name
_MOST_COMPILERS = 8  # most compilers at once: a container may use fewer cores than it sees, and each takes some 150 MiB
# Every C file is compiled for fp32 and for bf16: the same algorithm, with a suffix to its names.
_SCALARS = {"f32": [], "bf16": ["-DSCALAR_BF16"]}

SWITCH = "PILOTLIGHT_CPU"  # environment variable: the kind of CPU to build for, or `torch` for no library; if unset, this CPU's kind
TORCH = "torch"


class _CpuKind(NamedTuple):
    flags: tuple[str, ...]
    needs: str  # the required CPU feature, as named in /proc/cpuinfo


# Each kind's compiler flags, and the CPU feature that it needs. Which calls are measured against torch depends on other features: on CPUs with matrix
# units these are bf16 products and attention of prompts (gemm.c). If the kind "amx" is forced on a CPU without matrix units, tiles are computed in
# plain C (tiles.h), so that the code can be tested there.
_KINDS = {
    "avx2": _CpuKind(("-march=x86-64-v3",), "avx2"),
    "avx512": _CpuKind(("-march=x86-64-v4",), "avx512vl"),
    "avx512vnni": _CpuKind(("-march=x86-64-v4", "-mavx512vnni"), "avx512_vnni"),  # Cascade and Ice Lake
    "avx512bf16": _CpuKind(("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), "avx512_bf16"),  # Zen 4 and 5
    "amx": _CpuKind(("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-DSOFTWARE_TILES"), "avx512_bf16"),
}
KINDS = (*_KINDS, TORCH)

Progress = Callable[[int, int], None]  # (number of compiled files, number of all files)


class BuildError(Exception):
    """The library cannot be built or opened; the message is a sentence for the user."""


def _read_processor() -> str:
    """Return the lines of /proc/cpuinfo that -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


class LibraryBuild:
    """Finds or compiles the library of a processor.

    It is in the package or in the user's cache.
    """

    def __init__(
        self,
        sources: Path = SOURCES,
        read_processor: Callable[[], str] = _read_processor,
        shipped: Path = levels.FOLDER,
    ) -> None:
        """Choose the C files, the lines of /proc/cpuinfo, and the folder of packaged libraries."""
        self._sources = sources
        self._read_processor = read_processor
        self._shipped = shipped

    def forced_kind(self) -> str | None:
        """Return the kind of CPU that PILOTLIGHT_CPU names, or `torch`; None for the processor's own kind.

        Raises BuildError for a kind that is unknown or cannot run here.
        """
        name = os.environ.get(SWITCH)
        if not name or name == TORCH:
            return name or None
        kind = _KINDS.get(name)
        if kind is None:
            raise BuildError(
                f"{SWITCH}={name} is no kind of CPU: set it to {', '.join(KINDS[:-1])} or {TORCH}, or unset it"
            )
        if kind.needs not in self._read_processor().split():
            raise BuildError(f"{SWITCH}={name} needs a CPU with {kind.needs}, which this machine lacks; unset it")
        return name

    def find(self) -> Path | None:
        """Return the packaged library, or else a library built earlier for this machine and these sources.

        Removes a damaged library in the cache, which would crash its users. Returns None if there is no library, or PILOTLIGHT_CPU is `torch`.
        Raises BuildError.
        """
        kind = self.forced_kind()
        if kind == TORCH:
            return None
        if kind is None and (path := levels.find(self._read_processor(), self._shipped)) is not None:
            return path
        return _find(private_cache("kernels"), self._key(find_compiler(), _tuning(kind)))

    def build(self, progress: Progress = lambda *_: None) -> Path:
        """Find or build the library. Of several processes one compiles and the others wait. Raises BuildError.

        Compiles at normal priority, because the site computes with torch meanwhile: at the lowest priority, a site that was busy from its first
        minute had no library for 112 s, and steps of 850 ms instead of 95.
        """
        kind = self.forced_kind()
        if kind is None and (path := levels.find(self._read_processor(), self._shipped)) is not None:
            return path
        compiler, tuning = find_compiler(), _tuning(kind)
        folder, key = private_cache("kernels"), self._key(compiler, tuning)
        if (path := _find(folder, key)) is not None:
            return path
        # One lock for all keys: a lock for each could not be removed with its library while another process waits for it.
        with open(folder / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (path := _find(folder, key)) is None:
                _remove_unused(folder)
                scratch = folder / f"{key}{_SCRATCH}"
                scratch.mkdir()
                log.info("compiling the CPU kernels for this machine (only the first time)")
                began = time.monotonic()
                try:
                    compiled = _compile(self._sources, compiler, scratch, progress, tuning)
                    path = folder / f"{key}-{_digest(compiled)}.so"
                    durable.replace(compiled, path)
                finally:
                    shutil.rmtree(scratch)
                log.info("compiled the CPU kernels in %.0f s", time.monotonic() - began)
        return path

    def _key(self, compiler: str, tuning: tuple[str, ...]) -> str:
        """Return a key of sources, compiler and processor: machines may share a home directory."""
        key = hashlib.sha256()
        for source in [*sorted(self._sources.glob("*.c")), *sorted(self._sources.glob("*.h"))]:
            key.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        status = os.stat(compiler)
        processor = self._read_processor()
        of = (_FLAGS, tuning, compiler, status.st_size, status.st_mtime_ns, platform.machine(), processor)
        key.update(repr(of).encode())
        return key.hexdigest()[:32]


def _remove_unused(folder: Path) -> None:
    """Remove the scratch folders of killed builds, and libraries that no process has opened for a month.

    A process that still has such a library loaded keeps its mapping.
    """
    for scratch in folder.glob(f"*{_SCRATCH}"):
        shutil.rmtree(scratch, ignore_errors=True)
    for library in folder.glob("*.so"):
        with suppress(FileNotFoundError):
            if library.stat().st_mtime < time.time() - _UNUSED_S:
                for path in folder.glob(f"{library.name.partition('-')[0]}*"):  # with its measurements
                    path.unlink(missing_ok=True)


def discard_libraries() -> None:
    """Remove all libraries, for every machine, because any of them may be the one that crashes processes."""
    for path in private_cache("kernels").glob("*.so"):
        path.unlink(missing_ok=True)
        log.warning("removed %s; it will be built again", path)


def _find(folder: Path, key: str) -> Path | None:
    for path in folder.glob(f"{key}-*.so"):
        with suppress(FileNotFoundError):
            if path.stem == f"{key}-{_digest(path)}":
                with suppress(PermissionError):  # of a shared cache
                    os.utime(path)
                return path
            log.warning(
                "the CPU kernels in %s are damaged (their digest differs from the one in their name); building them again",
                path,
            )
            path.unlink()
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def build_level(level: levels.Level, folder: Path) -> Path:
    """Compile the library of a level into a folder, for a wheel; return its path. Raises BuildError."""
    scratch = folder / f".{level.name}{_SCRATCH}"
    scratch.mkdir(parents=True)
    try:
        compiled = _compile(SOURCES, find_compiler(), scratch, lambda *_: None, level.flags)
        path = folder / f"{levels.name_of(level, compiled)}.so"
        durable.replace(compiled, path)
    finally:
        shutil.rmtree(scratch)
    return path


def limits_file(library: Path, num_threads: int) -> Path:
    """Return the path of the file with a library's measurements on this machine. Raises BuildError."""
    return private_cache("kernels") / f"{library.stem}-{num_threads}.json"


def _compile(folder: Path, compiler: str, scratch: Path, progress: Progress, tuning: tuple[str, ...]) -> Path:
    """Compile each file for each scalar, several at once, largest first: 17 s instead of 33 on two cores."""
    command = [compiler, *_FLAGS, *tuning]
    sources = sorted(folder.glob("*.c"), key=lambda path: path.stat().st_size, reverse=True)
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


def find_compiler() -> str:
    """Return the path of the C compiler. Raises BuildError if there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(f"there is no C compiler ({', '.join(names)}); install one, for example the package gcc")


def _tuning(forced_kind: str | None) -> tuple[str, ...]:
    first_level = f"-DLEVEL1_KIB={level1_kib()}"
    if (kind := _KINDS.get(forced_kind or "")) is not None:
        return (*kind.flags, first_level)
    return ("-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native", first_level)


def level1_kib() -> int:
    """Return the size in KiB of a core's first-level data cache, or 32 if the system does not report it."""
    try:
        return max(0, os.sysconf(_LEVEL1_DCACHE_SIZE)) >> 10 or 32
    except OSError:  # this system does not know the number
        return 32


def private_cache(name: str) -> Path:
    """Return a folder of the user's cache, made as `private_folder` does. Raises BuildError."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise BuildError(
            f"there is no home directory: {error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return private_folder(cache / "pilotlight" / name)


def private_folder(folder: Path) -> Path:
    """Return `folder`, created if it is missing.

    Raises BuildError if other users can write to it, because its files are executed.
    """
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


def main(library: LibraryBuild) -> None:
    """Build a library if it does not exist, with a line of progress.

    If there is no compiler, print the consequence and succeed.
    """
    try:
        if library.forced_kind() == TORCH or library.find() is not None:
            return
        library.build(_show_progress)
    except BuildError as error:
        print(f"The CPU kernels cannot be compiled; torch is used instead, which is slower: {error}", file=sys.stderr)


def _show_progress(compiled: int, total: int) -> None:
    end = "\n" if compiled == total else "\r"
    if sys.stderr.isatty() or compiled in (0, total):
        line = f"Compiling the CPU kernels (the first time only): {compiled} of {total} files"
        print(line, end=end if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(LibraryBuild())
