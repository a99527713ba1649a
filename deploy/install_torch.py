"""Install torch without surprises: `.venv/bin/python deploy/install_torch.py` (the Makefile's first step; standard library only).

On a machine with an NVIDIA GPU, pip chooses the build. Otherwise the multi-gigabyte CUDA build is never installed. The script prefers a CPU build
from the machine's pip configuration, then PyTorch's CPU index if it can be reached within two seconds; else it prints how to get one and fails.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request

RANGE = ">=2.11,<2.14"  # as in pyproject.toml; a test compares the two
PINNED = "2.13.0"  # preferred: with a range, pip would take the newest CUDA build if there is no CPU build
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
REACH_TIMEOUT_S = 2.0


def main() -> int:
    if _installed():
        return 0
    if os.environ.get("TORCH_BUILD") == "default" or has_gpu() or not _pypi_build_needs_cuda():
        return _pip(f"torch{RANGE}")
    offered = cpu_build(_pip_versions())
    if offered is not None:
        return _pip(f"torch=={offered}")
    if _reachable(CPU_INDEX):
        return _pip(f"torch=={PINNED}", "--index-url", CPU_INDEX)
    print(
        "No CPU build of torch is offered here: PyTorch's CPU index cannot be reached and pip's configuration has none. "
        f"Put a torch-{PINNED}+cpu wheel in a folder and set PIP_FIND_LINKS to it, or run "
        "`make install TORCH_BUILD=default` to accept pip's choice (several gigabytes of CUDA).",
        file=sys.stderr,
    )
    return 1


def has_gpu() -> bool:
    if os.path.exists("/proc/driver/nvidia/version"):
        return True
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def cpu_build(versions: list[str]) -> str | None:
    """Return the pinned version's CPU build, else the newest CPU build in the range, else None."""
    builds = [
        version for version in versions if version.endswith("+cpu") and (2, 11) <= _release(version)[:2] < (2, 14)
    ]
    if f"{PINNED}+cpu" in builds:
        return f"{PINNED}+cpu"
    return max(builds, key=_release, default=None)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _pypi_build_needs_cuda() -> bool:
    """Tell whether PyPI's torch wheel for this machine contains CUDA. Only that for x86-64 Linux does."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


def _installed() -> bool:
    probe = (
        "import importlib.metadata as m, re; v = m.version('torch'); "
        "r = tuple(map(int, re.findall(r'\\d+', v.partition('+')[0])))[:2]; raise SystemExit(not (2, 11) <= r < (2, 14))"
    )
    return subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False).returncode == 0


def _pip_versions() -> list[str]:
    """Return the versions of torch that pip finds with the machine's configuration. Downloads nothing."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", "torch"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    listed = re.search(r"Available versions: (.*)", answer)
    return [version.strip() for version in listed.group(1).split(",")] if listed else []


def _reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=REACH_TIMEOUT_S) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def _pip(*arguments: str) -> int:
    print(f"Installing {arguments[0]} ...", flush=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
    quiet = [] if sys.stdout.isatty() else ["-q"]  # on a terminal, pip's own progress bar: torch is 200 MB
    return subprocess.run([*command, *quiet, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
