"""Unmodified coding agents that fix a line, served by a router and two sites.

python -m load_tests.scenarios.coding_agents

Each is installed from its registry and started as a user would start it, in a separate home directory. Only the engine is a test double
(tests/scripted_site.py), which writes a good model's answers: templates, parsers, grammars, dialects and the router are tested without a capable
model. Each agent has to make a failing test pass, undisturbed and with the answering site killed in the middle of the edit. Codex and Claude Code
also have ten turns of one conversation, for which the record has the cached share of prompts and the number of sites.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from load_tests.local_network import ROOT, free_ports
from load_tests.random_checkpoint import EMBER
from load_tests.records import Record, write_record
from load_tests.scenarios.clients import installed_npm, installed_pip
from pilotlight.wire.hop.headers import HOP_SECRET_ENV

MODEL = "agent"
AGENT_S = 240.0
TURNS = 10
TOKEN_S = 0.02  # seconds per token of an answer whose site is killed
WRONG, RIGHT = "    return a - b\n", "    return a + b\n"
MODULE = f"def add(a, b):\n{WRONG}"
CHECK = "from calc import add\n\nassert add(2, 3) == 5\nprint('passed')\n"
TASK = "The test in test_calc.py fails. Mend calc.py by changing one line, so that it passes."


class Agent(NamedTuple):
    """One agent: its packages, its command, and the model's answers turn by turn."""

    packages: tuple[str, ...]
    program: str
    options: Callable[[str, Path, str, bool], list[str]]  # arguments: router's URL, home, prompt, is a continuation
    environment: Callable[[str, Path], dict[str, str]]
    answers: Callable[[Path], list[str]]  # argument: the work folder
    edit_turn: int  # index of the answer with the edit
    needs_tools: bool = True
    is_node: bool = True
    files: Callable[[str, Path], dict[str, str]] = lambda url, home: {}  # files in its home


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def _codex(url: str, home: Path, said: str, goes_on: bool) -> list[str]:
    provider = f'model_providers.here={{name="here", base_url="{url}/v1", wire_api="responses", env_key="HERE_KEY"}}'
    settings = ("-c", provider, "-c", 'model_provider="here"', "-c", f'model="{MODEL}"')
    # The agent's sandbox needs namespaces, which some machines do not allow.
    free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return ["exec", *(("resume", "--last") if goes_on else ()), *free, *settings, said]


def _claude(url: str, home: Path, said: str, goes_on: bool) -> list[str]:
    return ["-p", said, "--model", MODEL, *(("--continue",) if goes_on else ()), "--allowedTools", "Read,Edit,Bash"]


def _opencode_files(url: str, home: Path) -> dict[str, str]:
    models = {MODEL: {"name": MODEL, "tool_call": True, "limit": {"context": 200_000, "output": 8000}}}
    options = {"baseURL": f"{url}/v1", "apiKey": "any"}
    provider = {"here": {"npm": "@ai-sdk/openai-compatible", "name": "here", "options": options, "models": models}}
    config = {"provider": provider, "model": f"here/{MODEL}", "small_model": f"here/{MODEL}", "autoupdate": False}
    return {"work/opencode.json": json.dumps({**config, "share": "disabled"})}


def _codex_answers(work: Path) -> list[str]:
    edit = f"sed -i 's/a - b/a + b/' {work}/calc.py && cd {work} && python3 test_calc.py"
    return ["I will mend the line.\n" + call("exec_command", cmd=edit), "The test passes."]


def _claude_answers(work: Path) -> list[str]:
    file = str(work / "calc.py")
    return [
        "I will look at it.\n" + call("Read", file_path=file),
        call("Edit", file_path=file, old_string=WRONG.rstrip("\n"), new_string=RIGHT.rstrip("\n")),
        call("Bash", command=f"cd {work} && python3 test_calc.py", description="Run the test"),
        "The test passes.",
    ]


def _qwen_answers(work: Path) -> list[str]:
    file = str(work / "calc.py")
    return [
        call("read_file", file_path=file),
        call("edit", file_path=file, old_string=WRONG.rstrip("\n"), new_string=RIGHT.rstrip("\n")),
        call("run_shell_command", command=f"cd {work} && python3 test_calc.py", is_background=False),
        "The test passes.",
    ]


def _opencode_answers(work: Path) -> list[str]:
    file = str(work / "calc.py")
    return [
        call("read", filePath=file),
        call("edit", filePath=file, oldString=WRONG.rstrip("\n"), newString=RIGHT.rstrip("\n")),
        call("bash", command=f"cd {work} && python3 test_calc.py"),
        "The test passes.",
    ]


def _aider_answers(work: Path) -> list[str]:
    block = f"calc.py\n```python\n<<<<<<< SEARCH\n{WRONG}=======\n{RIGHT}>>>>>>> REPLACE\n```\n"
    return [f"The sign is wrong.\n\n{block}"]


def _mini_answers(work: Path) -> list[str]:
    edit = f"sed -i 's/a - b/a + b/' {work}/calc.py && cd {work} && python3 test_calc.py"
    return [
        "THOUGHT: the sign is wrong.\n" + call("bash", command=edit),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]


AGENTS: dict[str, Agent] = {
    "Codex CLI": Agent(
        ("@openai/codex",),
        "codex",
        _codex,
        lambda url, home: {"CODEX_HOME": str(home / ".codex"), "HERE_KEY": "any"},
        _codex_answers,
        edit_turn=0,
        files=lambda url, home: {".codex/config.toml": ""},
    ),
    "Claude Code": Agent(
        ("@anthropic-ai/claude-code",),
        "claude",
        _claude,
        lambda url, home: {
            "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "any", "CLAUDE_CONFIG_DIR": str(home / ".claude"), "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        _claude_answers,
        edit_turn=1,
    ),
    "OpenCode": Agent(
        ("opencode-ai",),
        "opencode",
        lambda url, home, said, goes_on: ["run", "-m", f"here/{MODEL}", *(("--continue",) if goes_on else ()), said],
        lambda url, home: {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
        _opencode_answers,
        edit_turn=1,
        files=_opencode_files,
    ),
    "Qwen Code": Agent(
        ("@qwen-code/qwen-code",),
        "qwen",
        lambda url, home, said, goes_on: ["--auth-type", "openai", "--yolo", *(("--continue",) if goes_on else ()), "-p", said],
        lambda url, home: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "any", "OPENAI_MODEL": MODEL},
        _qwen_answers,
        edit_turn=1,
    ),
    "aider": Agent(
        ("aider-chat",),
        "aider",
        lambda url, home, said, goes_on: [
            "--model", f"openai/{MODEL}", "--openai-api-base", f"{url}/v1", "--openai-api-key", "any", "--no-git", "--yes-always",
            "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-detect-urls",
            "--edit-format", "diff", "--map-tokens", "0", "--message", said,
            "calc.py", "test_calc.py",
        ],
        lambda url, home: {},
        _aider_answers,
        edit_turn=0,
        needs_tools=False,
        is_node=False,
    ),
    "mini-swe-agent": Agent(
        ("mini-swe-agent",),
        "mini",
        lambda url, home, said, goes_on: ["-m", f"openai/{MODEL}", "-t", said, "-y", "--exit-immediately", "-l", "0"],
        lambda url, home: {
            "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "any", "MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
        },
        _mini_answers,
        edit_turn=0,
        is_node=False,
    ),
}  # fmt: skip
CONVERSING = ("Codex CLI", "Claude Code")


class ScriptedNetwork:
    """A router and two sites whose engines write the answers of a script; a context manager."""

    NAMES = ("ams1", "iad1")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "log"
        self._script = folder / "script.json"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {
            **os.environ, HOP_SECRET_ENV: secrets.token_hex(32), "XDG_STATE_HOME": str(folder / "state"), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def __enter__(self) -> "ScriptedNetwork":
        router, *ports = free_ports(1 + len(self.NAMES))
        self.url = f"http://127.0.0.1:{router}"
        place = 'place = { city = "here", latitude = 0.0, longitude = 0.0 }\n'
        network = f"listen = {{ port = {router} }}\n{place}"
        for name, port in zip(self.NAMES, ports, strict=True):
            network += f'\n[[sites]]\nname = "{name}"\nurl = "http://127.0.0.1:{port}"\n{place}'
            (self._folder / f"{name}.toml").write_text(
                f'name = "{name}"\n{place}listen = {{ port = {port} }}\n[engine]\nstandby = false\nweights_host_gib = 0.0\n'
                f'[[models]]\nname = "{MODEL}"\nsource = "{EMBER}"\n'
            )
        (self._folder / "network.toml").write_text(network)
        self.say(["Hello."])
        self._log.touch()
        self._start("router", "pilotlight.edge_router.serve", self._folder / "network.toml")
        self.mend()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def say(self, answers: list[str], *, needs_tools: bool = True, token_s: float = 0.0) -> None:
        """Write the script of the answers from now on."""
        script = {"answers": answers, "aside": "Mending a line", "needs_tools": needs_tools, "token_s": token_s}
        self._script.write_text(json.dumps(script))

    def mend(self) -> None:
        """Start the sites that are not running, and wait until the router uses both."""
        for name in self.NAMES:
            if name not in self._processes or self._processes[name].poll() is not None:
                self._start(name, "tests.scripted_site", self._folder / f"{name}.toml", self._script, self._log)
        deadline = time.monotonic() + 60.0
        while self._healthy() < len(self.NAMES):
            if time.monotonic() > deadline:
                raise RuntimeError("the sites did not become healthy; their logs are in " + str(self._folder))
            time.sleep(0.1)

    def kill(self, site: str) -> None:
        self._processes[site].kill()
        self._processes[site].wait()

    def noted(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the lines of the engines' log, from number `since`."""
        lines = self._log.read_text().splitlines()[since:]
        return [json.loads(line) for line in lines]

    @property
    def num_noted(self) -> int:
        return len(self._log.read_text().splitlines())

    def _healthy(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as answer:
                return len(json.load(answer)["healthy"])
        except OSError:
            return 0

    def _start(self, name: str, module: str, *arguments: Path) -> None:
        with (self._folder / f"{name}.log").open("ab") as sink:
            command = [sys.executable, "-m", module, *map(str, arguments)]
            self._processes[name] = subprocess.Popen(command, cwd=ROOT, env=self._environment, stdout=sink, stderr=sink)


class InstalledAgent(NamedTuple):
    agent: Agent
    binary: Path
    path: str  # PATH of the programs that it starts
    version: str

    def run(self, url: str, home: Path, said: str, *, goes_on: bool = False) -> tuple[int, str]:
        """Run the agent in its home's work folder; return its exit code and the end of its output."""
        environment = {"PATH": self.path, "HOME": str(home), "TERM": "dumb", **self.agent.environment(url, home)}
        command = [str(self.binary), *self.agent.options(url, home, said, goes_on)]
        try:
            ended = subprocess.run(
                command, cwd=home / "work", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=AGENT_S
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return -1, f"no end within {AGENT_S:g} s"
        return ended.returncode, (ended.stdout + ended.stderr)[-1500:]


def install(name: str, folder: Path, fresh: bool) -> InstalledAgent:
    agent = AGENTS[name]
    if agent.is_node:
        node, place = installed_npm(name, agent.packages, folder, fresh)
        binary = place / "node_modules" / ".bin" / agent.program
        manifest = place / "node_modules" / agent.packages[0] / "package.json"
        return InstalledAgent(
            agent, binary, f"{node}:{os.environ['PATH']}", json.loads(manifest.read_text())["version"]
        )
    place = installed_pip(name, agent.packages, folder, fresh)
    look = f"import importlib.metadata as m; print(m.version({agent.packages[0]!r}))"
    version = subprocess.run([place / "bin" / "python", "-c", look], capture_output=True, text=True, check=True).stdout
    return InstalledAgent(agent, place / "bin" / agent.program, os.environ["PATH"], version.strip())


@contextlib.contextmanager
def new_home(agent: Agent, url: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        for name, text in {"work/calc.py": MODULE, "work/test_calc.py": CHECK, **agent.files(url, home)}.items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
        yield home


def edit(network: ScriptedNetwork, installed: InstalledAgent, *, kills: bool) -> Record:
    """Let an agent fix the line. `kills`: kill the answering site in the middle of the edit."""
    agent = installed.agent
    network.mend()
    began = network.num_noted
    killed: list[str] = []
    with new_home(agent, network.url) as home:
        network.say(agent.answers(home / "work"), needs_tools=agent.needs_tools, token_s=TOKEN_S if kills else 0.0)
        has_ended = threading.Event()
        watcher = threading.Thread(target=_kill_amid_edit, args=(network, agent.edit_turn, began, has_ended, killed))
        if kills:
            watcher.start()
        code, said = installed.run(network.url, home, TASK)
        has_ended.set()
        if kills:
            watcher.join()
        passes = (
            subprocess.run([sys.executable, "test_calc.py"], cwd=home / "work", capture_output=True).returncode == 0
        )
        mended = (home / "work" / "calc.py").read_text() == MODULE.replace(WRONG, RIGHT)
    answers = [note for note in network.noted(began) if "prompt" in note]
    wrong = [note["wrong"] for note in answers if note["wrong"]]
    # After the kill a stream continues after the delivered part; an answer that is not streamed is computed again.
    edits = {note["site"] for note in answers if note["turn"] == agent.edit_turn and not note["aside"]}
    went_on = any(note["delivered"] for note in answers) or len(edits) > 1
    works = code == 0 and passes and mended and not wrong and (not kills or (bool(killed) and went_on))
    reason = "" if works else f"exit {code}, passes {passes}, killed {killed}, continued {went_on}, {wrong[:1]} {said}"
    return {"verdict": "works" if works else "fails", "reason": reason, "requests": len(answers)}


def _kill_amid_edit(
    network: ScriptedNetwork, turn: int, began: int, has_ended: threading.Event, killed: list[str]
) -> None:
    while not has_ended.wait(0.02):
        for note in network.noted(began):
            if "token" in note and not note["aside"] and note["turn"] == turn and note["token"] >= note["of"] // 2:
                network.kill(note["site"])
                killed.append(note["site"])
                return


def converse(network: ScriptedNetwork, installed: InstalledAgent) -> Record:
    """Run ten turns of one conversation.

    Return the cached share of each turn's prompt from the second on, and how many sites answered.
    """
    network.mend()
    network.say([f"This is answer {turn}." for turn in range(TURNS)])
    began = network.num_noted
    with new_home(installed.agent, network.url) as home:
        for turn in range(TURNS):
            code, said = installed.run(network.url, home, f"This is question {turn}.", goes_on=turn > 0)
            if code != 0:
                return {"verdict": "fails", "reason": f"turn {turn}: exit {code}: {said}"}
    turns = [note for note in network.noted(began) if "prompt" in note and not note["aside"]]
    shares = [round(note["cached"] / note["prompt"], 4) for note in turns[1:]]
    found = {"turns": len(turns), "cached": shares, "sites": len({note["site"] for note in turns})}
    works = len(turns) == TURNS and min(shares) >= 0.95 and found["sites"] == 1
    return {"verdict": "works" if works else "fails", "reason": "" if works else json.dumps(found), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers" / "clients", help="where agents are installed")
    parser.add_argument("--only", action="append", choices=list(AGENTS), help="run only these, and write no record")
    parser.add_argument("--fresh", action="store_true", help="install the current versions again")
    options = parser.parse_args()
    console = Console()
    results: Record = {}
    folder = Path(tempfile.mkdtemp(prefix="agents-"))
    with ScriptedNetwork(folder) as network:
        for name in options.only or AGENTS:
            installed = install(name, options.folder.resolve(), options.fresh)
            checks = {
                "an edit": edit(network, installed, kills=False),
                "an edit, its site killed": edit(network, installed, kills=True),
            }
            if name in CONVERSING:
                checks["ten turns, cached"] = converse(network, installed)
            results[name] = {"version": installed.version, "checks": checks}
            for check, outcome in checks.items():
                told = f"{name} {installed.version}: {check}: {outcome['verdict']} {outcome['reason']}"
                console.print(told, highlight=False, markup=False, soft_wrap=True)
    shutil.rmtree(folder, ignore_errors=True)
    if not options.only:
        console.print(f"Record: {write_record('coding-agents', results, ())}", soft_wrap=True)
    verdicts = [check["verdict"] for agent in results.values() for check in agent["checks"].values()]
    sys.exit("fails" in verdicts)


if __name__ == "__main__":
    main()
