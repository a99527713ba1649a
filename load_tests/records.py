"""Records: one JSON file per measurement with its machine, versions, commit and date.

The figures of README.md and docs/ come from these files.
"""

import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from pilotlight.engine.api.gpu_state import read_states

Record = dict[str, Any]
# CPU features that decide which matrix kernels can run.
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
_KINDS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 bf16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}  # the first that a CPU has
FORCED = "forced"  # field of a machine: the kind of CPU to which PILOTLIGHT_CPU limits this project's kernels
RESULTS = Path(__file__).parent / "results"
# Files that measurements write; changes of these do not make a record dirty.
_WRITTEN = ("load_tests/results", "docs/page", "docs/*.png", "docs/*.svg")
CPUINFO = Path("/proc/cpuinfo")


def write_record(subject: str, results: dict[str, Any], packages: tuple[str, ...] = ("torch",)) -> Path:
    """Write load_tests/results/<date>-<machine>-<subject>.json (under $OUT if that is set)."""
    now = datetime.now(UTC)
    machine = describe_machine()
    record = {
        "subject": subject,
        "date": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine,
        **({"gpus": states} if (states := read_states()) else {}),  # the GPUs' states at the time of writing
        "versions": {name: _version(name) for name in ("pilotlight-inference", *packages)},
        "results": results,
    }
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    name = str(machine["accelerator"] or machine["processor"]).partition(",")[0]  # without the driver's version
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    slug += f"-{forced}" if (forced := machine.get(FORCED)) else ""
    path = folder / f"{now:%Y-%m-%d}-{slug}-{subject}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def spread(values: list[float], digits: int = 3) -> dict[str, float]:
    """Return the median, extremes and count of measurements."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "n": len(values),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """Return `spread` with p50, p95 and p99, each a measured value."""
    ordered = sorted(values)
    at = {f"p{share}": round(ordered[int(share / 100 * (len(ordered) - 1))], 3) for share in (50, 95, 99)}
    return {**spread(values), **at}


@cache
def describe_machine(cpuinfo: Path = CPUINFO) -> dict[str, Any]:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    forced = os.environ.get("PILOTLIGHT_CPU")
    return {
        **({FORCED: forced} if forced else {}),
        "processor": _of_cpuinfo(cpuinfo, "model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in _FLAGS if flag in _of_cpuinfo(cpuinfo, "flags").split()],
        "cores": os.cpu_count(),
        "memory_gib": round(memory_gib),
        "accelerator": _accelerator(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def cpu_kind(machine: dict[str, Any]) -> str:
    """Return the kind of a record's CPU, by its units for matrix products; empty if unknown."""
    flags = machine.get("flags", ())
    kind = next((name for flag, name in _KINDS.items() if flag in flags), "")
    return f"{kind}, limited to {forced}" if (forced := machine.get(FORCED)) else kind


def cpu_name(machine: dict[str, Any]) -> str:
    """Return a CPU's short name and its kind: "AMD EPYC with AVX2"."""
    name = str(machine["processor"]).replace("(R)", "").replace(" Processor", "").strip()
    return f"{name} with {kind}" if (kind := cpu_kind(machine)) else name


@cache
def commit() -> str:
    """Return the commit, with a plus sign if the tree differs from it in more than records and pictures.

    Without git, return $PILOTLIGHT_COMMIT.
    """
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        left_out = (f":(top,exclude){path}" for path in _WRITTEN)
        return head + ("+" if _git("status", "--porcelain", "-uno", "--", ":/", *left_out) else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("PILOTLIGHT_COMMIT", "unknown")


@cache
def history() -> frozenset[str] | None:
    """Return the first 12 digits of every commit up to this one.

    None if the whole history is not available (no git, a shallow clone).
    """
    try:
        if _git("rev-parse", "--is-shallow-repository") == "true":
            return None
        return frozenset(line[:12] for line in _git("rev-list", "HEAD").splitlines())
    except (OSError, subprocess.CalledProcessError):
        return None


def doubt(record: Record, known: frozenset[str] | None) -> str | None:
    """Return why a record's figures must not be shown; None if its commit can be checked out."""
    made = str(record["commit"])
    if made.endswith("+"):
        return "measured in a tree with uncommitted changes"
    if made == "unknown" or (known is not None and made[:12] not in known):
        return "measured at a commit that this history does not have"
    return None


@cache
def has_changed_since(made: str, paths: tuple[str, ...]) -> bool:
    """Tell whether files under `paths` differ between a record's commit and this one.

    False if git cannot compare them.
    """
    try:
        return bool(_git("diff", "--name-only", made, "HEAD", "--", *(f":/{path}" for path in paths)))
    except (OSError, subprocess.CalledProcessError):
        return False


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()


def _of_cpuinfo(cpuinfo: Path, key: str) -> str:
    """Return a value of the first processor in /proc/cpuinfo; empty if there is no such file or line."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")


def _accelerator() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        answer = []
    # A container may have the device but no nvidia-smi; a process that measures it has loaded torch.
    torch = sys.modules.get("torch")
    if not answer and torch is not None and torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return answer[0] if answer else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
