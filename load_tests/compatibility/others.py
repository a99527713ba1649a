"""Randomly chosen functions of other authors, each started by `pilotlight dev` with a request GET /.

    python -m load_tests.compatibility.others FOLDER [--count 30] [--seed 1] [--tree CHECKOUT]

FOLDER holds clones. Any status below 500 counts as an answer, because a function has none of its author's secrets, data and accounts. Ember replaces
the Workers AI models that a function's files name. `--tree` runs an older checkout of this project, without models.
"""

import argparse
import asyncio
import os
import random
import re
import shutil
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from load_tests.compatibility.dev_server import UNCOPIED, DevServer
from load_tests.local_network import ROOT

MANIFESTS = ("wrangler.jsonc", "wrangler.json", "wrangler.toml")
MAIN = re.compile(r'"main"\s*:\s*"([^"]+)"')
MODEL = re.compile(r"""["'](@(?:cf|hf)/[\w./-]+)["']""")


async def main(folder: Path, count: int, seed: int, tree: Path) -> int:
    found = sorted(await asyncio.to_thread(lambda: list(functions(folder))))
    chosen = sorted(random.Random(seed).sample(found, min(count, len(found))))
    print(f"{len(chosen)} of {len(found)} functions, seed {seed}\n\n| function | answer | reason |\n|---|---|---|")
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="pilotlight-others-") as place:
        os.chmod(place, 0o755)
        for number, each in enumerate(chosen):
            copy = Path(place) / f"f{number}"
            await asyncio.to_thread(shutil.copytree, each, copy, ignore=UNCOPIED)
            kind, why = await outcome(copy, [] if tree != ROOT else model_options(copy), tree)
            kinds[kind] += 1
            reason = " ".join(why.split()).replace("|", "/")[:240]
            print(f"| {each.relative_to(folder)} | {kind} | {reason} |", flush=True)
    answered = sum(number for kind, number in kinds.items() if kind in ("2xx", "3xx", "4xx"))
    print(f"\n{answered} of {len(chosen)} answer ({dict(kinds)})")
    return 0


async def outcome(folder: Path, options: list[str], tree: Path) -> tuple[str, str]:
    server = DevServer(folder, options, tree=tree)
    try:
        async with server, server.session.get("/", allow_redirects=False) as response:
            text = await response.text(errors="replace")
            return f"{response.status // 100}xx", text if response.status >= 400 else ""
    except Exception as error:
        return "none", f"{type(error).__name__}: {error}"
    finally:
        await server.session.close()


def functions(folder: Path) -> Iterator[Path]:
    """Find folders with a manifest whose main is a Python file."""
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in ("node_modules", ".git", ".venv")]
        for name in MANIFESTS:
            if name in files and (main := main_of(Path(parent) / name)).endswith(".py"):
                if (Path(parent) / main).is_file():
                    yield Path(parent)
                break


def main_of(manifest: Path) -> str:
    try:
        text = manifest.read_text(encoding="utf-8-sig")
        if manifest.suffix == ".toml":
            return str(tomllib.loads(text).get("main", ""))
        found = MAIN.search(text)  # there may be comments, which json refuses
        return found[1] if found is not None else ""
    except (ValueError, OSError):
        return ""


def model_options(folder: Path) -> list[str]:
    names = {name for path in folder.rglob("*.py") for name in MODEL.findall(path.read_text(errors="replace"))}
    return [word for name in sorted(names) for word in ("--model", f"{name}=ember")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tree", type=Path, default=ROOT)
    given = parser.parse_args()
    sys.exit(asyncio.run(main(given.folder, given.count, given.seed, given.tree)))
