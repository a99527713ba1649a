"""Build the files of a release: `python deploy/release.py [--out dist]` (`make release`).

The files are a wheel with the CPU kernels' library for six levels of x86-64, and SHA-256 sums. The version is the tag's; between tags it is that of
pyproject.toml with `.devN+gCOMMIT`. On another architecture the wheel is pure Python, and the library is compiled at the first start. Needs the
standard library and a C compiler.
"""

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(
    ".*", "build", "*.egg-info", "__pycache__", "results", "tests", "docs", "runs", "dist"
)
X86 = ("x86_64", "AMD64")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a release.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--levels", help="comma-separated levels of the CPU kernels' library; all by default")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.whl"), out / "SHA256SUMS"):
        old.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="pilotlight-release-") as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        set_version(tree / "pyproject.toml", version_of(ROOT))
        is_x86 = platform.machine() in X86
        if is_x86:
            build_levels(tree, arguments.levels.split(",") if arguments.levels else None)
        wheel = build_wheel(tree, out)
        if is_x86:
            wheel = retag(wheel, f"manylinux_{newest_glibc(tree)}_x86_64")
    write_sums(out)
    print(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB)")
    return 0


def version_of(root: Path) -> str:
    """Return the version of the tag (v1.2.3), else the project's version with `.devN+gCOMMIT`."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    if tag := git("describe", "--tags", "--exact-match", "--match", "v*"):
        return tag.removeprefix("v")
    found = re.search(r'^version = "(.*)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    last = git("describe", "--tags", "--abbrev=0", "--match", "v*")
    count, commit = git("rev-list", "--count", f"{last}..HEAD" if last else "HEAD"), git("rev-parse", "--short", "HEAD")
    return f"{found[1]}.dev{count}+g{commit}" if commit else found[1]


def set_version(project: Path, version: str) -> None:
    text, count = re.subn(
        r'^version = ".*"$', f'version = "{version}"', project.read_text(), count=1, flags=re.MULTILINE
    )
    assert count == 1
    project.write_text(text)


def build_levels(tree: Path, names: list[str] | None) -> None:
    """Compile the tree's CPU kernels for each of the named levels (all if None), into the tree."""
    code = (
        "import sys, pathlib; from pilotlight.kernels.cpu import build; from pilotlight.kernels.cpu.shipped import levels\n"
        "for level in levels.LEVELS:\n"
        "    if sys.argv[1] in ('', level.name) or level.name in sys.argv[1].split(','):\n"
        "        print(build.build_level(level, levels.FOLDER).name, flush=True)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code, ",".join(names or ())],
        cwd=tree,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tree)},
    )


def build_wheel(tree: Path, out: Path) -> Path:
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(tree)], check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def newest_glibc(tree: Path) -> str:
    """Return the newest glibc version that the libraries need, as in a wheel's tag ("2_34")."""
    found = set()
    for library in (tree / "kernels/cpu/shipped").glob("*.so"):
        found |= set(re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes()))
    major, minor = max((int(major), int(minor)) for major, minor in found)
    return f"{major}_{minor}"


def retag(wheel: Path, platform_tag: str) -> Path:
    """Tag a wheel with its platform; any Python 3 on the platform can install it."""
    subprocess.run(
        [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", platform_tag, str(wheel)],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (tagged,) = wheel.parent.glob("*.whl")
    return tagged


def write_sums(out: Path) -> None:
    files = sorted(path for path in out.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    sys.exit(main())
