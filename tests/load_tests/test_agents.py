"""The scenario of coding agents: how an agent is stopped, and how its requests are counted."""

import fcntl
import json
import sys
from pathlib import Path
from typing import cast

import pytest

from load_tests.agent_network import AgentNetwork, Answered
from load_tests.agents import Agent, InstalledAgent, new_home
from load_tests.random_checkpoint import EMBER
from load_tests.scenarios.coding_agents import FIRST, first_requests, real_edit

ASKED = Answered("POST", "/v1/chat/completions", 200)
REFUSED = Answered("POST", "/v1/responses", 400)
LISTED = Answered("GET", "/v1/models", 200)


class FakeNetwork:
    """A router's log to which an agent's turns add requests."""

    url = "http://here"

    def __init__(self) -> None:
        self.log: list[Answered] = []

    def answered(self) -> list[Answered]:
        return self.log


def an_agent(*options: str) -> Agent:
    return Agent(
        (), "python", lambda url, home, said, goes_on: list(options), lambda url, home: {}, lambda work: [], edit_turn=0
    )


class FakeAgent:
    """An agent that sends some requests in each turn."""

    def __init__(self, network: FakeNetwork, *turns: list[Answered], code: int = 0) -> None:
        self.agent = an_agent()
        self._network, self._turns, self._code = network, turns, code
        self.continued: list[bool] = []

    def run(self, *_: object, goes_on: bool = False, **__: object) -> tuple[int | None, str]:
        self._network.log += self._turns[len(self.continued)]
        self.continued.append(goes_on)
        return self._code, "done"


def first_requests_of(*turns: list[Answered], code: int = 0) -> tuple[dict[str, object], FakeAgent]:
    network = FakeNetwork()
    network.log.append(REFUSED)  # an earlier agent's
    agent = FakeAgent(network, *turns, code=code)
    return first_requests(cast(AgentNetwork, network), cast(InstalledAgent, agent)), agent


def test_an_agent_whose_turns_end_early_goes_on_until_it_has_sent_ten_requests() -> None:
    outcome, agent = first_requests_of(*[[LISTED, *[ASKED] * 4]] * 3)
    assert outcome == {"verdict": "works", "reason": "", "requests": 15, "statuses": {"200": 15}}
    assert agent.continued == [False, True, True]


@pytest.mark.parametrize(
    "turns",
    [[[ASKED] * FIRST + [REFUSED]], [[ASKED] * FIRST + [Answered("GET", "/v1/models", 404)]], [[LISTED]] * FIRST],
    ids=["a refused request", "a refused look-up", "too few requests"],
)
def test_a_refusal_or_too_few_requests_fail(turns: list[list[Answered]]) -> None:
    assert first_requests_of(*turns)[0]["verdict"] == "fails"


def test_an_agent_that_ends_with_an_error_fails() -> None:
    assert first_requests_of([ASKED] * 5, [ASKED] * 5, code=1)[0]["verdict"] == "fails"


def test_a_routers_log_is_read_as_requests(tmp_path: Path) -> None:
    network = AgentNetwork(tmp_path, ("ams1",), EMBER, {})
    access = {"logger": "pilotlight.access", "method": "POST", "path": "/v1/messages", "status": 200, "bytes": 9}
    other = {"logger": "pilotlight.edge_router.serve", "message": "listening"}
    (tmp_path / "router.log").write_text("\n".join(map(json.dumps, [other, access])) + "\nTraceback\n")
    assert network.answered() == [Answered("POST", "/v1/messages", 200)]


@pytest.mark.process
class TestRunning:
    def installed(self, code: str) -> InstalledAgent:
        return InstalledAgent(an_agent("-c", code), Path(sys.executable), "/usr/bin:/bin", "1")

    def test_an_agents_exit_code_and_output_are_returned(self) -> None:
        agent = self.installed("import sys; print('said'); print('warned', file=sys.stderr); sys.exit(3)")
        with new_home(agent.agent, "") as home:
            code, said = agent.run("", home, "")
        assert code == 3
        assert set(said.split()) == {"said", "warned"}

    def test_an_agent_that_has_done_enough_is_stopped_with_the_programs_that_it_started(self, tmp_path: Path) -> None:
        held = tmp_path / "held"
        child = f"import fcntl, signal; f = open({str(held)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print('x', file=f, flush=True); signal.pause()"
        agent = self.installed(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])")
        with new_home(agent.agent, "") as home:
            code, _ = agent.run("", home, "", enough=lambda: held.exists() and held.read_text() == "x\n")
        assert code is None
        with held.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the child's lock ends with it

    def test_an_edit_that_leaves_the_module_wrong_but_changes_the_test_fails(self) -> None:
        agent = self.installed("open('test_calc.py', 'w').write('')")
        outcome = real_edit("", list, agent, 60.0)
        assert outcome["verdict"] == "fails"

    def test_an_edit_of_the_wrong_line_works(self) -> None:
        mend = "text = open('calc.py').read(); open('calc.py', 'w').write(text.replace('a - b', 'a + b'))"
        outcome = real_edit("", list, self.installed(mend), 60.0)
        assert outcome["verdict"] == "works"
