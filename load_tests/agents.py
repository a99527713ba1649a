"""Coding agents of other projects: packages, command, settings and home of each.

Each agent is unmodified and is started as a user would start it, with an empty home and an arbitrary key. `answers` is what a good model would write
turn by turn, for scripted engines.
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from load_tests.scenarios.clients import installed_npm, installed_pip

MODEL = "agent"
LIMIT_S = 240.0
POLL_S = 0.05
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


def _copilot_answers(work: Path) -> list[str]:
    file = str(work / "calc.py")
    return [
        call("view", path=file),
        call("edit", path=file, old_str=WRONG.rstrip("\n"), new_str=RIGHT.rstrip("\n")),
        call("bash", command=f"cd {work} && python3 test_calc.py", description="Run the test"),
        "The test passes.",
    ]


def _pi_answers(work: Path) -> list[str]:
    file = str(work / "calc.py")
    return [
        call("read", path=file),
        call("edit", path=file, edits=[{"oldText": WRONG.rstrip("\n"), "newText": RIGHT.rstrip("\n")}]),
        call("bash", command=f"cd {work} && python3 test_calc.py"),
        "The test passes.",
    ]


def _pi_files(url: str, home: Path) -> dict[str, str]:
    model = {"id": MODEL, "contextWindow": 200_000, "maxTokens": 8000}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "any", "models": [model]}
    return {".pi/agent/models.json": json.dumps({"providers": {"here": provider}})}


def _continue_answers(work: Path) -> list[str]:
    file = str(work / "calc.py")
    return [
        call("Read", filepath=file),
        call("Edit", file_path=file, old_string=WRONG.rstrip("\n"), new_string=RIGHT.rstrip("\n")),
        call("Bash", command=f"cd {work} && python3 test_calc.py"),
        "The test passes.",
    ]


def _continue_files(url: str, home: Path) -> dict[str, str]:
    model = {"name": MODEL, "model": MODEL, "provider": "openai", "apiBase": f"{url}/v1", "apiKey": "any"}
    config = {"name": "here", "version": "1.0.0", "schema": "v1", "models": [{**model, "capabilities": ["tool_use"]}]}
    return {"config.yaml": json.dumps(config)}  # JSON is YAML


def _cline_answers(work: Path) -> list[str]:
    file = str(work / "calc.py")
    return [
        call("read_files", files=[{"path": file}]),
        call("editor", path=file, old_text=WRONG.rstrip("\n"), new_text=RIGHT.rstrip("\n")),
        call("run_commands", commands=[f"cd {work} && python3 test_calc.py"]),
        "The test passes.",
    ]


def _cline_files(url: str, home: Path) -> dict[str, str]:
    settings = {"provider": "openai-compatible", "apiKey": "any", "model": MODEL, "baseUrl": f"{url}/v1"}
    saved = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {
        "version": 1,
        "lastUsedProvider": "openai-compatible",
        "modes": {},
        "providers": {"openai-compatible": saved},
    }
    return {".cline/data/settings/providers.json": json.dumps(providers)}


def _aider_answers(work: Path) -> list[str]:
    return [f"The sign is wrong.\n\ncalc.py\n```\n{MODULE.replace(WRONG, RIGHT)}```\n"]


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
    "Copilot CLI": Agent(
        ("@github/copilot",),
        "copilot",
        lambda url, home, said, goes_on: ["-p", said, "--allow-all-tools", *(("--continue",) if goes_on else ())],
        lambda url, home: {
            "COPILOT_PROVIDER_BASE_URL": f"{url}/v1", "COPILOT_MODEL": MODEL, "COPILOT_OFFLINE": "true", "COPILOT_AUTO_UPDATE": "false",
        },
        _copilot_answers,
        edit_turn=1,
    ),
    "pi": Agent(
        ("@mariozechner/pi-coding-agent",),
        "pi",
        lambda url, home, said, goes_on: ["-p", "--provider", "here", "--model", MODEL, *(("--continue",) if goes_on else ()), said],
        lambda url, home: {"PI_OFFLINE": "1"},
        _pi_answers,
        edit_turn=1,
        files=_pi_files,
    ),
    "Continue CLI": Agent(
        ("@continuedev/cli",),
        "cn",
        lambda url, home, said, goes_on: ["--config", str(home / "config.yaml"), "--auto", *(("--resume",) if goes_on else ()), "-p", said],
        lambda url, home: {"CONTINUE_TELEMETRY_ENABLED": "0"},
        _continue_answers,
        edit_turn=1,
        files=_continue_files,
    ),
    "Cline": Agent(
        ("cline",),
        "cline",
        lambda url, home, said, goes_on: ["-P", "openai-compatible", "-m", MODEL, said],
        lambda url, home: {"CLINE_TELEMETRY_DISABLED": "1"},
        _cline_answers,
        edit_turn=1,
        files=_cline_files,
    ),
    "aider": Agent(
        ("aider-chat",),
        "aider",
        lambda url, home, said, goes_on: [
            "--model", f"openai/{MODEL}", "--openai-api-base", f"{url}/v1", "--openai-api-key", "any", "--no-git", "--yes-always",
            "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-detect-urls",
            "--map-tokens", "0", *(("--restore-chat-history",) if goes_on else ()), "--message", said, "calc.py", "test_calc.py",
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


class InstalledAgent(NamedTuple):
    agent: Agent
    binary: Path
    path: str  # PATH of the programs that it starts
    version: str

    def run(
        self,
        url: str,
        home: Path,
        said: str,
        *,
        goes_on: bool = False,
        limit_s: float = LIMIT_S,
        enough: Callable[[], bool] = lambda: False,
    ) -> tuple[int | None, str]:
        """Run the agent in its home's work folder, at most `limit_s` seconds and until `enough` returns true.

        Return its exit code, None if it was stopped, and the end of its output.
        """
        environment = {"PATH": self.path, "HOME": str(home), "TERM": "dumb", **self.agent.environment(url, home)}
        command = [str(self.binary), *self.agent.options(url, home, said, goes_on)]
        output = home / "output"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command, cwd=home / "work", env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )  # fmt: skip
            deadline = time.monotonic() + limit_s
            while process.poll() is None and time.monotonic() < deadline and not enough():
                time.sleep(POLL_S)
            code = process.poll()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the programs that it has started
            process.wait()
        return code, output.read_text(errors="replace")[-1500:]


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
