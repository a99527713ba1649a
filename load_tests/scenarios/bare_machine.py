"""Install and start Pilotlight on a bare Debian, from a clone, from the wheel and in the image.

python -m load_tests.scenarios.bare_machine --folder BIG --wheel dist/NAME.whl [--suites bookworm trixie sid] [--ways wheel clone image]
    [--functions-only sid] [--no-record]

For each suite debootstrap makes a minimal system in a folder, in which everything then runs with its own mounts. A way installs Pilotlight with one
command and starts it with a second one; a chat must be answered, then a function. The record has the seconds and sizes. Installations from the
wheel and images run without a network but loopback, and without a compiler. The image is built from deploy/Containerfile by buildah
without a daemon, and runs as its user on a read-only root. Needs root, debootstrap, for images buildah, and a mirror of Debian.

pip in the system uses the configuration of `--pip-conf`; `--bind` shows it folders of this machine, such as one with wheels. `--torch` and
`--torch-index` are build arguments of the image. Of the suites of `--functions-only`, for whose Python no build of torch for CPUs is at hand, the
wheel and a function are tried.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from load_tests.records import write_record

ROOT = Path(__file__).parents[2]
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "ca-certificates,python3,python3-venv,tini"
FOR_CLONES = "gcc,libc6-dev,make,git"
WAYS = ("wheel", "clone", "image")
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")
# Runs in the bare system with its own Python, with nothing but the standard library.
INSIDE = r"""
import json, os, signal, subprocess, sys, time, urllib.request

start, folder, home = json.loads(sys.argv[1]), sys.argv[2], os.environ["HOME"]
CHAT = {"model": "ember", "messages": [{"role": "user", "content": "What is the airport code of Lisbon?"}]}

def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.read().decode()

def first_answer(process, url, body=None):
    began = time.monotonic()
    while True:
        try:
            return ask(url, body), round(time.monotonic() - began, 1)
        except OSError as error:
            if process.poll() is not None or time.monotonic() - began > 900:
                raise SystemExit(f"no answer from {url}: {error}; status {process.poll()}")
            time.sleep(0.1)

def end(process):
    process.send_signal(signal.SIGTERM)
    process.wait(120)

chat_s = None
if start:
    process = subprocess.Popen(start, cwd=folder)
    answer, chat_s = first_answer(process, "http://127.0.0.1:8787/v1/chat/completions", CHAT)
    assert "LIS" in answer, answer
    end(process)
subprocess.run(["pilotlight", "init", "hello"], cwd=home, check=True)
site = f"{home}/ams1.toml"
with open(site, "w") as file:  # without torch there is no model, and `pilotlight dev` serves one
    file.write('name = "ams1"\nplace = {city = "here", latitude = 0.0, longitude = 0.0}\nlisten = {port = 8790}\n')
    file.write(f'[functions]\nserve = [{{name = "hello", path = "{home}/hello"}}]\n')
process = subprocess.Popen(["pilotlight", *(["dev", "hello", "--port", "8790"] if start else ["site", site])], cwd=home)
answer, function_s = first_answer(process, "http://127.0.0.1:8790/fn/hello/")
assert answer, "the function answers"
end(process)
compilers = [name for name in ("cc", "gcc", "clang") if any(os.access(f"{place}/{name}", os.X_OK) for place in ("/bin", "/usr/bin"))]
print("RESULT " + json.dumps({"chat_s": chat_s, "function_s": function_s, "compilers": compilers, "python": sys.version.split()[0]}))
"""


class Machine:
    """A minimal Debian system in a folder."""

    def __init__(self, suite: str, folder: Path, options: argparse.Namespace) -> None:
        self.suite, self.root, self._options = suite, folder / suite, options
        self.installed = folder / f"{suite}.done"

    def make(self, packages: str) -> float:
        """Make the system, unless an earlier run has made it; return the seconds that it took."""
        began = time.monotonic()
        if not self.installed.exists():
            shutil.rmtree(self.root, ignore_errors=True)
            command = [
                "debootstrap",
                "--variant=minbase",
                f"--include={packages}",
                self.suite,
                str(self.root),
                self._options.mirror,
            ]
            run(command)
            run(["/usr/sbin/chroot", str(self.root), "apt-get", "clean"])  # as in published images
            self.installed.touch()
        for file in NETWORK_FILES:
            if Path(file).exists():
                shutil.copy(file, f"{self.root}{file}")
        if self._options.pip_conf is not None:
            shutil.copy(self._options.pip_conf, self.root / "etc/pip.conf")
        return time.monotonic() - began

    @contextmanager
    def copied(self, way: str) -> Iterator["Machine"]:
        """Yield a copy, which is removed afterwards, so that one way has nothing of another one."""
        copy = Machine(self.suite, self.root.parent, self._options)
        copy.root = self.root.parent / f"{self.suite}-{way}"
        shutil.rmtree(copy.root, ignore_errors=True)
        try:
            run(["cp", "-a", str(self.root), str(copy.root)])
            yield copy
        finally:
            shutil.rmtree(copy.root, ignore_errors=True)

    def inside(
        self,
        command: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        is_offline: bool = False,
        user: str = "",
        mounts: str = "",
    ) -> str:
        """Run a command in the system with its own mounts; return its output. Raises RuntimeError if it fails."""
        lines = [
            f"mount --bind {self.root} {self.root}",
            f"mount -t proc proc {self.root}/proc",
            f"mount --rbind /dev {self.root}/dev",
        ]
        for folder in self._options.bind:
            (self.root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
            lines.append(f"mount --bind {folder} {self.root}{folder}")
        if is_offline:
            lines.append("ip link set lo up")
        asked = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", **(environment or {})}
        settings = [f"{name}={value}" for name, value in asked.items()]
        flags = [f"--userspec={user}"] if user else []
        script = "set -e; " + "; ".join([*lines, *([mounts] if mounts else []), 'exec env -i "$@"'])
        return run(
            [
                "unshare",
                "-mn" if is_offline else "-m",
                "bash",
                "-c",
                script,
                "bash",
                *settings,
                "/usr/sbin/chroot",
                *flags,
                str(self.root),
                *command,
            ]
        )


def run(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:300]}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def size_mib(*folders: Path) -> int:
    """Return the size of folders on disk in MiB."""
    return int(run(["du", "-sxcm", *map(str, folders)]).splitlines()[-1].split()[0])


def tried(
    machine: Machine, start: list[str], folder: str, environment: dict[str, str], **options: Any
) -> dict[str, Any]:
    """Start Pilotlight in the system; return the seconds until a chat and a function were answered."""
    output = machine.inside(
        ["python3", "-c", INSIDE, json.dumps(start), folder], environment=environment, is_offline=True, **options
    )
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def from_wheel(machine: Machine, options: argparse.Namespace) -> dict[str, Any]:
    """Install the wheel into a virtual environment: `pip install`, then `pilotlight up`."""
    shutil.copy(options.wheel, machine.root / "tmp")
    shutil.copy(ROOT / "deploy" / "install_torch.py", machine.root / "tmp")
    has_torch = machine.suite not in options.functions_only
    began = time.monotonic()
    install = (
        "python3 -m venv /opt/pilotlight && export PATH=/opt/pilotlight/bin:$PATH && "
        f"{'python /tmp/install_torch.py && ' if has_torch else ''}pip install -q --no-cache-dir /tmp/{options.wheel.name}"
    )
    machine.inside(["sh", "-c", install])
    took_s = time.monotonic() - began
    environment = {"PATH": "/opt/pilotlight/bin:/usr/bin:/bin"}
    results = tried(machine, ["pilotlight", "up"] if has_torch else [], "/", environment)
    return {"install_s": round(took_s, 1), "mib": size_mib(machine.root / "opt/pilotlight"), **results}


def from_clone(machine: Machine, options: argparse.Namespace) -> dict[str, Any]:
    """Clone the repository, then `make up`, which installs first."""
    machine.inside(
        [
            "sh",
            "-c",
            f"apt-get -qq update && apt-get -qq install -y --no-install-recommends {FOR_CLONES.replace(',', ' ')}",
        ]
    )
    clone = machine.root / "opt/clone"
    run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(clone)])
    began = time.monotonic()
    machine.inside(["make", "-C", "/opt/clone", "kernels"])
    took_s = time.monotonic() - began
    environment = {"PATH": "/opt/clone/.venv/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    results = tried(machine, ["make", "up"], "/opt/clone", environment)
    return {"install_s": round(took_s, 1), "mib": size_mib(clone), **results}


def from_image(machine: Machine, options: argparse.Namespace) -> dict[str, Any]:
    """Build the image on the bare system, then run its command as its user on a read-only root."""
    if shutil.which("buildah") is None:
        raise FileNotFoundError("buildah is missing (Debian: apt-get install buildah)")
    storage = machine.root.parent / "storage"
    buildah = ["buildah", "--root", str(storage), "--runroot", str(storage / "run"), "--storage-driver", "vfs"]
    base = f"localhost/debian-{machine.suite}"
    began = time.monotonic()
    container = run([*buildah, "from", "scratch"]).strip()
    run([*buildah, "add", "-q", container, str(machine.root), "/"])
    run([*buildah, "commit", "-q", container, base])
    run([*buildah, "rm", container])
    arguments = [f"BASE={base}", f"WHEEL={options.wheel.name}"]
    arguments += [f"TORCH={options.torch}"] if options.torch else []
    arguments += [f"TORCH_INDEX={options.torch_index}"] if options.torch_index else []
    command = [
        *buildah,
        "bud",
        "--format",
        "docker",
        "--isolation",
        "chroot",
        "--target",
        "cpu",
        "-t",
        "localhost/pilotlight:cpu",
    ]
    command += [word for argument in arguments for word in ("--build-arg", argument)]
    command += [word for folder in options.bind for word in ("-v", f"{folder}:{folder}:ro")]
    run([*command, "-f", str(ROOT / "deploy/Containerfile"), str(options.wheel.parent)])
    took_s = time.monotonic() - began
    container = run([*buildah, "from", "localhost/pilotlight:cpu"]).strip()
    try:
        image = Machine(machine.suite, machine.root.parent, options)
        image.root = Path(run([*buildah, "mount", container]).strip())
        changeable = [f"{image.root}/{folder}" for folder in ("var/lib/pilotlight", "var/cache/pilotlight", "tmp")]
        mounts = "; ".join([
            *(f"mount -t tmpfs -o mode=1777 tmpfs {folder}" for folder in changeable), f"mount -o remount,bind,ro {image.root}",
        ])  # fmt: skip
        environment = {
            "PATH": "/opt/pilotlight/bin:/usr/bin:/bin", "HOME": "/var/lib/pilotlight", "XDG_STATE_HOME": "/var/lib",
            "XDG_CACHE_HOME": "/var/cache",
        }  # fmt: skip
        start = ["tini", "--", "pilotlight", "serve", "ember", "--host", "0.0.0.0", "--port", "8787", "--open-to-all"]
        results = tried(image, start, "/", environment, user="10001:10001", mounts=mounts)
        return {"install_s": round(took_s, 1), "mib": size_mib(image.root), **results}
    finally:
        run([*buildah, "rm", container])
        shutil.rmtree(storage)


TRIED: dict[str, Callable[[Machine, argparse.Namespace], dict[str, Any]]] = {
    "wheel": from_wheel, "clone": from_clone, "image": from_image,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, required=True, help="for the systems, some gigabytes each; kept for the next run"
    )
    parser.add_argument("--wheel", type=Path, required=True, help="of `make release`")
    parser.add_argument("--suites", nargs="+", default=["bookworm", "trixie", "sid"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--mirror", default=MIRROR)
    parser.add_argument("--functions-only", nargs="+", default=[], help="suites without a build of torch")
    parser.add_argument("--torch", default="", help="requirement or URL of torch's CPU build, for the image")
    parser.add_argument("--torch-index", default="", help="index of torch's CPU build, for the image")
    parser.add_argument("--pip-conf", type=Path)
    parser.add_argument("--bind", action="append", default=[])
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        sys.exit("This needs root and debootstrap (Debian: apt-get install debootstrap).")
    options.folder.mkdir(parents=True, exist_ok=True)
    options.folder, options.wheel = options.folder.absolute(), options.wheel.absolute()
    results: dict[str, dict[str, Any]] = {}
    for suite in options.suites:
        machine = Machine(suite, options.folder, options)
        print(f"{suite}: made in {machine.make(PACKAGES):.0f} s", flush=True)
        for way in ["wheel"] if suite in options.functions_only else options.ways:
            try:
                with machine.copied(way) as copy:
                    results[f"{suite}, {way}"] = TRIED[way](copy, options)
            except (RuntimeError, FileNotFoundError) as error:
                results[f"{suite}, {way}"] = {"error": str(error)[-2000:]}
            print(f"{suite}, {way}: {results[f'{suite}, {way}']}", flush=True)
    show(Console(), results)
    if not options.no_record:
        print("Record:", write_record("bare-machine", results))
    if any("error" in each or (each["compilers"] and "clone" not in name) for name, each in results.items()):
        sys.exit(1)


def show(console: Console, results: dict[str, dict[str, Any]]) -> None:
    table = Table(
        "Debian, way",
        "Python",
        "install s",
        "MiB",
        "until a chat s",
        "until a function s",
        box=None,
        header_style="bold",
    )
    for name, found in results.items():
        columns = (found.get(key, "") for key in ("python", "install_s", "mib", "chat_s", "function_s"))
        table.add_row(name, *map(str, columns))
    console.print(table)


if __name__ == "__main__":
    main()
