"""Unmodified coding agents that fix a line, served by a router and two sites.

    python -m load_tests.scenarios.coding_agents                                  about 15 minutes
    python -m load_tests.scenarios.coding_agents --model FILE.gguf --peers .peers                (make peers)

Each is installed from its registry and started as a user would start it, in a separate home directory. The first command tests the API without a
capable model. Its engine is a test double (tests/scripted_site.py), which writes a good model's answers: templates, parsers, grammars, dialects and
the router are real. Each agent has to make a failing test pass, undisturbed and with the answering site killed in the middle of the edit. Codex and
Claude Code also have ten turns of one conversation, for which the record has the cached share of prompts and the number of sites. Last, each agent
sends its first ten requests to a real engine with random weights and a context of 65,536 tokens: none may be refused, by the router's log.

With `--model`, each agent gets the same task from a real model, which this engine and llama.cpp's server serve in turn. The agents with short prompts
are the first.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from load_tests import random_checkpoint
from load_tests.agent_network import AgentNetwork, Answered, ScriptedNetwork
from load_tests.agents import (
    AGENTS,
    CHECK,
    LIMIT_S,
    MODEL,
    MODULE,
    RIGHT,
    TASK,
    WRONG,
    InstalledAgent,
    install,
    new_home,
)
from load_tests.local_network import ROOT
from load_tests.peers.llama_server import LlamaServer, find_program
from load_tests.records import Record, write_record
from load_tests.scenarios.engines import OURS

PEER = "llama.cpp"
CONVERSING = ("Codex CLI", "Claude Code")
TURNS = 10
FIRST = 10  # requests to random weights
TOKEN_S = 0.02  # seconds per token of an answer whose site is killed
CONTEXT = 32768  # of the real model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / ".peers" / "clients", help="where agents are installed")
    parser.add_argument("--only", action="append", choices=list(AGENTS), help="run only these, and write no record")
    parser.add_argument("--fresh", action="store_true", help="install the current versions again")
    parser.add_argument(
        "--model", type=Path, help="the GGUF file of a real model, with which each agent fixes the line"
    )
    parser.add_argument("--server", action="append", choices=[OURS, PEER], help="serve --model by these alone")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="the folder that make peers has filled")
    parser.add_argument("--peer-flags", default="", help="of llama-server; an AMX build by gcc 12 needs --no-repack")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the engine that serves --model")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="time that an agent has with --model")
    options = parser.parse_args()
    agents = {
        name: install(name, options.folder.resolve(), options.fresh)
        for name in AGENTS
        if name in (options.only or AGENTS)
    }
    if options.model is None:
        subject, found = "coding-agents", by_tests(agents)
    else:
        subject, found = "coding-agents-model", by_model(agents, options)
    if not options.only:
        Console().print(f"Record: {write_record(subject, found, ())}", soft_wrap=True)
    verdicts = [check["verdict"] for agent in found.values() for check in agent["checks"].values()]
    sys.exit(options.model is None and "fails" in verdicts)


def by_tests(agents: dict[str, InstalledAgent]) -> Record:
    """Return the outcome of each agent's checks with scripted answers and random weights."""
    found: Record = {name: {"version": agent.version, "checks": {}} for name, agent in agents.items()}
    with _folder() as folder, ScriptedNetwork(folder) as network:
        for name, agent in agents.items():
            _note(found, name, "an edit", edit(network, agent, kills=False))
            _note(found, name, "an edit, its site killed", edit(network, agent, kills=True))
            if name in CONVERSING:
                _note(found, name, "ten turns, cached", converse(network, agent))
    with (
        _folder() as folder,
        AgentNetwork(folder, ("ams1",), random_checkpoint.write_for_agents(folder / "model"), {"threads": 1}) as real,
    ):
        for name, agent in agents.items():
            _note(found, name, "first ten requests", first_requests(real, agent))
    return found


def by_model(agents: dict[str, InstalledAgent], options: argparse.Namespace) -> Record:
    """Return the outcome of each agent's edit with a real model, by this engine and by llama.cpp's server."""
    found: Record = {name: {"version": agent.version, "checks": {}} for name, agent in agents.items()}
    servers = {OURS: _by_us, PEER: _by_peer}
    for server in options.server or servers:
        with servers[server](options) as (url, answered):
            for name in reversed(found):
                _note(found, name, server, real_edit(url, answered, agents[name], options.limit_s))
    return found


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="agents-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _note(found: Record, name: str, check: str, outcome: Record) -> None:
    found[name]["checks"][check] = outcome
    figures = {key: value for key, value in outcome.items() if key not in ("verdict", "reason")}
    told = f"{name} {found[name]['version']}: {check}: {outcome['verdict']} {figures} {outcome['reason']}"
    Console().print(told, highlight=False, markup=False, soft_wrap=True)


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
        passes = _passes(home)
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


def first_requests(network: AgentNetwork, installed: InstalledAgent) -> Record:
    """Let an agent send ten requests in one conversation; return their statuses by the router's log.

    An agent whose turn ends earlier is started again, with the next prompt.
    """
    began = len(network.answered())
    codes: list[int | None] = []

    def has_asked() -> bool:
        return len(_asked(network.answered()[began:])) >= FIRST

    with new_home(installed.agent, network.url) as home:
        while len(codes) < FIRST and not has_asked():
            code, said = installed.run(network.url, home, "Go on.", goes_on=bool(codes), enough=has_asked)
            codes.append(code)
    answered = network.answered()[began:]
    refused = [one for one in answered if one.status >= 400]
    failed = [code for code in codes[:-1] if code != 0]
    works = has_asked() and not refused and not failed
    statuses = dict(Counter(str(one.status) for one in answered))
    return {
        "verdict": "works" if works else "fails",
        "reason": "" if works else f"{refused[:3]}, exits {codes}: {said}",
        "requests": len(answered),
        "statuses": statuses,
    }


def _asked(answered: list[Answered]) -> list[Answered]:
    return [one for one in answered if one.method == "POST"]


def real_edit(url: str, answered: Callable[[], list[Answered]], installed: InstalledAgent, limit_s: float) -> Record:
    """Let an agent fix the line with a real model.

    It works if the unchanged test passes and the agent ended by itself, without an error.
    """
    already, began = len(answered()), time.monotonic()
    with new_home(installed.agent, url) as home:
        code, said = installed.run(url, home, TASK, limit_s=limit_s)
        took_s = time.monotonic() - began
        (home / "work" / "test_calc.py").write_text(CHECK)
        passes = _passes(home)
    works = passes and code == 0
    if not works:
        Console().print(said, highlight=False, markup=False, soft_wrap=True)
    ending = f"stopped after {limit_s:g} s" if code is None else "" if code == 0 else f"exit {code}"
    statuses = Counter(str(one.status) for one in answered()[already:])
    return {
        "verdict": "works" if works else "fails",
        "reason": "" if works else ", ".join(filter(None, (ending, "" if passes else "the test fails"))),
        "seconds": round(took_s, 1),
        "statuses": dict(statuses),
    }


@contextlib.contextmanager
def _by_us(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], list[Answered]]]]:
    engine = {"threads": options.threads, "kv_gib": 1.5, "standby": False}
    with _folder() as folder, AgentNetwork(folder, ("ams1",), options.model.resolve(), engine) as network:
        yield network.url, network.answered


@contextlib.contextmanager
def _by_peer(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], list[Answered]]]]:
    program = find_program(options.peers, "llama-server")
    if program is None:
        sys.exit("llama.cpp is not set up; run: make peers")
    flags = ["--jinja", "-c", str(CONTEXT), "-np", "1", "--alias", MODEL, *options.peer_flags.split()]
    with _folder() as folder, LlamaServer(program, options.model, options.threads, folder / "log", flags) as server:
        yield server.url, lambda: []


def _passes(home: Path) -> bool:
    command = [sys.executable, "test_calc.py"]
    return subprocess.run(command, cwd=home / "work", capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
