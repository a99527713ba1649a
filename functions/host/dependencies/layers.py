"""Layers: installed packages, shared by all versions of functions with the same dependencies.

A layer is a directory named by the digest of its dependencies and interpreter; it appears only when it is complete. Only wheels are installed:
building a source distribution would run its author's code with the site's privileges.
"""

import asyncio
import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from pilotlight.functions.host.dependencies.python_versions import OWN, Interpreter
from pilotlight.functions.manifest import ManifestError, read_toml
from pilotlight.support import atomic_files

log = logging.getLogger("pilotlight.function")

PROJECT, LIST = "pyproject.toml", "requirements.txt"
# Requirements that are not installed: names of the SDK, which the site has, and modules of the standard library that Pyodide has as packages.
PROVIDED = frozenset(
    {"workers-py", "workers-runtime-sdk", "webtypy", "pyodide-py"}
    | {"ssl", "sqlite3", "lzma", "hashlib", "distutils", "pydecimal", "pydoc-data"}
)
INSTALL_S = 300.0
DAY_S = 86_400.0
LAST_LINES = 12
MAX_REQUIREMENTS = 200
# A requirement of PEP 508 (https://peps.python.org/pep-0508): name, extras, versions, marker; no URL, path or installer option.
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(\[[A-Za-z0-9._,\s-]*\])?\s*"
    r"\(?(?:(?:===?|[<>~!]=|[<>])\s*[A-Za-z0-9.*+!_-]+\s*,?\s*)*\)?\s*(;.*)?"
)


class LayerError(Exception):
    """The packages cannot be installed; the message contains the installer's output."""


def requirements_of(folder: Path) -> tuple[str, ...]:
    """Return the sorted requirements of a function's pyproject.toml or else requirements.txt.
    Raises ManifestError."""
    project, listed = folder / PROJECT, folder / LIST
    if project.is_file():
        found = _of_project(project)
        if found is not None:
            return _checked(found, project)
    if listed.is_file():
        lines = (line.split(" #")[0].strip() for line in listed.read_text(encoding="utf-8").splitlines())
        return _checked([line for line in lines if line and not line.startswith("#")], listed)
    return ()


class LayerBudget(NamedTuple):
    """Limits of the unused layers that are kept for rollbacks: size in MiB, and days since the last use."""

    mib: int = 4096
    days: float = 30.0
    young_s: float = 3600.0  # all are kept this long: open requests to a replaced version may still import from them
    prune_every_s: float = 600.0


class Layers:
    """The layers of one site, in one directory."""

    def __init__(self, directory: Path, budget: LayerBudget = LayerBudget()) -> None:  # noqa: B008 - it is frozen
        self.directory = directory
        self._budget = budget
        self._making: dict[str, asyncio.Task[Path]] = {}
        self._used: dict[object, str] = {}  # digests of layers in use, by user (one per pool)

    def keep_in(self, directory: Path) -> None:
        """Set the directory; a site without a state directory has one only while it serves."""
        self.directory = directory

    def use(self, user: object, requirements: tuple[str, ...], python: Interpreter = OWN) -> None:
        """Record that a pool uses the layer of these requirements, until `release`."""
        self._used[user] = digest_of(requirements, python)

    def is_used_by(self, user: object) -> bool:
        return user in self._used

    def release(self, user: object) -> None:
        if (digest := self._used.pop(user, None)) is not None:
            with suppress(OSError):  # its modification time marks the end of its use
                os.utime(self.directory / digest)

    async def keep_pruned(self) -> None:
        """Prune regularly, until cancelled."""
        while True:
            await asyncio.sleep(self._budget.prune_every_s)
            await self.prune()

    async def get(self, requirements: tuple[str, ...], python: Interpreter = OWN) -> Path:
        """Return the layer of these requirements, installed if needed.
        Concurrent callers wait for the same installation. Raises LayerError."""
        digest = digest_of(requirements, python)
        path = self.directory / digest
        if path.is_dir():
            os.utime(path)
            return path
        task = self._making.get(digest)
        if task is None:
            task = self._making[digest] = asyncio.create_task(
                self._make(requirements, path, python), name=f"layer {digest}"
            )
            task.add_done_callback(lambda done: self._made(digest, done))
        return await asyncio.shield(task)

    async def prune(self) -> None:
        """Delete unused layers: first expired ones, then the oldest until the others fit the budget."""
        found, budget = await asyncio.to_thread(self.measured), self._budget
        in_use, doomed = set(self._used.values()), []
        spare = [layer for layer in found if layer.path.name not in in_use]
        size = sum(layer.size for layer in spare)
        for layer in found:
            if layer.path.name in in_use:
                os.utime(layer.path)
        for layer in sorted(spare, key=lambda layer: layer.used_at):
            age_s = time.time() - layer.path.stat().st_mtime  # `get` or `release` may have touched it meanwhile
            if age_s > budget.young_s and (age_s > budget.days * DAY_S or size > budget.mib << 20):
                size -= layer.size
                doomed.append(layer.path.rename(self.directory / f".gone-{layer.path.name}"))
        for path in doomed:
            log.info("no function uses the packages %s any longer: deleted", path.name.removeprefix(".gone-"))
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def measured(self) -> list["_Layer"]:
        """Measure all complete layers; delete incomplete ones of an earlier run."""
        found = []
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            used_at = path.stat().st_mtime
            if path.name.startswith(".gone-") or (
                path.name.startswith(".making-") and time.time() - used_at > 2 * INSTALL_S
            ):
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_dir() and not path.name.startswith("."):
                found.append(_Layer(path, used_at, _size_of(path)))
        return found

    async def close(self) -> None:
        tasks = tuple(self._making.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _made(self, digest: str, task: "asyncio.Task[Path]") -> None:
        self._making.pop(digest, None)
        if not task.cancelled():
            task.exception()  # the waiting callers get the error

    async def _make(self, requirements: tuple[str, ...], path: Path, python: Interpreter) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.directory, prefix=".making-", ignore_cleanup_errors=True) as name:
            made = Path(name) / "layer"
            made.mkdir(mode=0o755)
            (listed := Path(name) / LIST).write_text("".join(f"{each}\n" for each in requirements))
            log.info("installing %s", ", ".join(requirements))
            began = time.monotonic()
            await _install(listed, made, python)
            log.info("installed in %.1f s", time.monotonic() - began)
            (made / "layer-requirements.txt").write_text(listed.read_text())
            await asyncio.to_thread(atomic_files.let_others_read, made)
            await asyncio.to_thread(atomic_files.sync_all, made)
            self._publish(made, path)
        return path

    def _publish(self, made: Path, path: Path) -> None:
        with _locked(self.directory / ".lock"):
            if not path.is_dir():  # another process may have made the same layer
                os.rename(made, path)
                atomic_files.sync(path.parent)


class _Layer(NamedTuple):
    path: Path
    used_at: float
    size: int


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total


def digest_of(requirements: tuple[str, ...], python: Interpreter = OWN) -> str:
    built_for = (python.tag, sysconfig.get_platform(), platform.libc_ver()[0])
    return hashlib.sha256("\n".join((*map(str, built_for), *requirements)).encode()).hexdigest()[:32]


async def _install(listed: Path, target: Path, python: Interpreter) -> None:
    command = [*_installer(python), "--target", str(target), "--only-binary", ":all:", "-r", str(listed)]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(INSTALL_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise LayerError(f"the installation did not end within {INSTALL_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = output.decode("utf-8", "replace").strip().splitlines()
        raise LayerError("\n".join(lines[-LAST_LINES:]) or f"the installer ended with status {process.returncode}")


def _installer(python: Interpreter) -> list[str]:
    if (uv := shutil.which("uv")) is not None:
        return [uv, "pip", "install", "--quiet", "--python", python.path, "--compile-bytecode"]
    if find_spec("pip") is not None:
        other = [] if python is OWN else ["--python", python.path]
        return [sys.executable, "-m", "pip", *other, "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    raise LayerError("functions with dependencies need uv or pip; install one of them where this site runs")


def _of_project(path: Path) -> list[str] | None:
    """Return the dependencies of a pyproject.toml; None if it names none. Raises ManifestError."""
    try:
        project = read_toml(path).get("project", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{path}: {error}") from None
    found = project.get("dependencies") if isinstance(project, dict) else None
    if found is not None and not (isinstance(found, list) and all(isinstance(each, str) for each in found)):
        raise ManifestError(f"{path}: project.dependencies must be a list of strings")
    return found


def _checked(requirements: list[str], path: Path) -> tuple[str, ...]:
    if len(requirements) > MAX_REQUIREMENTS:
        raise ManifestError(f"{path}: {len(requirements)} requirements, of at most {MAX_REQUIREMENTS}")
    kept: set[str] = set()
    for requirement in requirements:
        found = _REQUIREMENT.fullmatch(requirement.strip())
        if found is None or "\n" in requirement:
            raise ManifestError(
                f"{path}: {requirement!r} is not a name with versions; paths, URLs and installer options are not supported"
            )
        if re.sub(r"[-_.]+", "-", found["name"]).lower() not in PROVIDED:
            kept.add(requirement.strip())
    return tuple(sorted(kept))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
