"""`pilotlight manage`: typed commands against a scripted API."""

import json
import re
from collections.abc import Callable
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.manage import manage_commands
from pilotlight.runtime.cli.manage.manage import Manager
from pilotlight.runtime.cli.manage.manage_commands import manage as commands

SITE = {"site": "ams1", "models": [{"name": "ember", "residency": "device", "detail": ""}]}
FITS = {"fits": True, "reason": "it fits", "kv_tokens": 12_000, "tokens_per_s": 345.6}
MODEL = {
    "source": "/models/[bold]x", "is_here": True, "file_bytes": 3 << 30, "context_length": 8192, "license": "mit",
    "served_as": ["x"], "how": "", "fit": FITS,
}  # fmt: skip


class ScriptedApi:
    """A fake of the API client: it answers by path, records requests, and makes one step of progress at each query."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, Any]] = []
        self.statuses = [{"sites": [{"site": "ams1", "status": SITE}]}]
        self.catalogues: list[dict[str, Any]] = [
            {"sites": {"ams1": {"models": [MODEL], "downloads": []}}, "unread": {}}
        ]
        self.answers: dict[str, Any] = {}

    def get_json(self, path: str) -> Any:
        if path == "/status":
            return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if path == "/manage/catalogue":
            return self.catalogues.pop(0) if len(self.catalogues) > 1 else self.catalogues[0]
        self.sent.append(("GET", path, None))
        return self.answers[path.partition("?")[0]]

    def send(self, method: str, path: str, body: bytes | None, token: str) -> Any:
        self.sent.append((method, path, None if body is None else json.loads(body)))
        return self.answers.get(path, {"started": True})


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> ScriptedApi:
    scripted = ScriptedApi()
    monkeypatch.setattr(manage_commands, "_manager", lambda url: Manager(cast(Api, scripted), poll_s=0.0))
    monkeypatch.setenv("COLUMNS", "200")
    return scripted


Typed = Callable[..., tuple[str, str]]


@pytest.fixture
def typed() -> Typed:
    """Run a command; return its standard output and standard error."""

    def typed(*words: str) -> tuple[str, str]:
        result = CliRunner().invoke(commands, words)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.stdout, result.stderr

    return typed


def download(state: str, done: int, error: str = "") -> dict[str, Any]:
    row = {"source": "org/x", "state": state, "done_bytes": done, "total_bytes": 10, "error": error}
    return {"sites": {"ams1": {"models": [], "downloads": [row]}}, "unread": {}}


def serving(*models: dict[str, Any]) -> dict[str, Any]:
    return {"sites": [{"site": "ams1", "status": {"site": "ams1", "models": [*SITE["models"], *models]}}]}


def test_the_catalogue_is_a_table_in_which_texts_are_only_texts(api: ScriptedApi, typed: Typed) -> None:
    away = MODEL | {
        "source": "org/y",
        "is_here": False,
        "how": "it has to be downloaded first",
        "fit": None,
        "file_bytes": 0,
    }
    small = MODEL | {"source": "z", "fit": {"fits": False, "reason": "1.0 GiB are missing"}}
    api.catalogues = [{"sites": {"ams1": {"models": [MODEL, away, small]}}, "unread": {"iad1": "no answer"}}]
    printed, beside = typed("catalogue")
    lines = printed.splitlines()
    assert lines[1].split() == ["ams1", "/models/[bold]x", "yes", "3.00", "GiB", "8,192", "12,000", "346", "mit", "x"]
    assert "it has to be downloaded first" in lines[2]
    assert "1.0 GiB are missing" in lines[3]
    assert beside == "iad1: no answer\n"
    assert json.loads(typed("catalogue", "--json")[0])["unread"] == {"iad1": "no answer"}


def test_a_pull_is_followed_to_its_end(api: ScriptedApi, typed: Typed) -> None:
    api.catalogues = [download("running", 1), download("running", 9), download("done", 10)]
    assert typed("pull", "org/x")[0] == "org/x is at ams1\n"
    assert api.sent == [("POST", "/manage/sites/ams1", {"action": "pull", "source": "org/x"})]


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (download("failed", 3, "the disk is full"), "the disk is full"),
        (download("cancelled", 3), "the download was cancelled"),
        (
            {"sites": {"ams1": {"models": [], "downloads": []}}, "unread": {}},
            "was restarted and lost the download. Start it again",
        ),
        ({"sites": {}, "unread": {"ams1": "no answer"}}, "The progress at ams1 cannot be read (no answer)"),
    ],
)
def test_a_pull_that_ends_otherwise_says_why(
    api: ScriptedApi, typed: Typed, last: dict[str, Any], sentence: str
) -> None:
    api.catalogues = [download("running", 1), last]
    with pytest.raises(CliError, match=re.escape(sentence)):
        typed("pull", "org/x")


def test_a_model_is_run_until_it_is_awake(api: ScriptedApi, typed: Typed) -> None:
    loading = {"name": "x", "residency": "loading", "detail": "50 % of [its] weights"}
    awake = {"name": "x", "residency": "device", "detail": ""}
    api.statuses = [serving(), serving(), serving(), serving(loading), serving(awake)]
    printed, beside = typed(
        "run", "/models/x", "--name", "x", "--kv-dtype", "fp8", "--context", "4096", "--max-devices", "2"
    )
    assert printed == "ams1 serves x\n"
    assert "50 % of [its] weights" in beside
    ((_, path, fields),) = api.sent
    assert path == "/manage/sites/ams1"
    assert fields == {
        "action": "run", "source": "/models/x", "model": "x", "residency": "auto", "lossless": "auto", "kv_dtype": "fp8",
        "context_tokens": 4096, "max_devices": 2,
    }  # fmt: skip


def test_a_model_that_cannot_be_loaded_ends_the_run_with_the_cause(api: ScriptedApi, typed: Typed) -> None:
    failed = {"name": "x", "residency": "failed", "detail": "no such tensor"}
    api.statuses = [serving(), serving(), serving(failed)]
    with pytest.raises(CliError, match="x cannot be loaded: no such tensor"):
        typed("run", "/models/x")


@pytest.mark.parametrize("action", ["wake", "sleep", "remove"])
def test_a_model_is_named_with_its_site(api: ScriptedApi, typed: Typed, action: str) -> None:
    assert typed(action, "ember", "--site", "a/b")[0] == f"{action} ember at a/b: started\n"
    assert api.sent == [("POST", "/manage/sites/a%2Fb", {"action": action, "model": "ember"})]


@pytest.mark.parametrize("action", ["drain", "resume"])
def test_a_site_is_drained_and_resumed(api: ScriptedApi, typed: Typed, action: str) -> None:
    assert typed(action, "ams1")[0] == f"{action} ams1: started\n"
    assert api.sent == [("POST", "/manage/sites/ams1", {"action": action, "model": ""})]


def test_of_several_sites_one_has_to_be_named(api: ScriptedApi, typed: Typed) -> None:
    api.statuses = [{"sites": [{"site": name, "status": {**SITE, "site": name}} for name in ("ams1", "iad1")]}]
    with pytest.raises(CliError, match="one of the sites by --site: ams1, iad1"):
        typed("wake", "ember")
    api.statuses = [{"sites": []}]
    with pytest.raises(CliError, match="none has published its status"):
        typed("wake", "ember")


def test_a_key_is_printed_alone_so_that_a_script_can_take_it(api: ScriptedApi, typed: Typed) -> None:
    api.answers["/manage/keys"] = {"name": "alice", "key": "pl-secret"}
    printed, beside = typed("create-key", "alice", "--scope", "models", "--scope", "metrics", "--tokens-per-day", "500")
    assert printed == "pl-secret\n"
    assert "shown only now" in beside
    assert api.sent == [
        ("POST", "/manage/keys", {"name": "alice", "scopes": ["models", "metrics"], "tokens_per_day": 500})
    ]
    assert typed("revoke-key", "a b")[0] == "a b is refused from now on\n"
    assert api.sent[-1] == ("DELETE", "/manage/keys/a%20b", None)


def test_the_hub_is_searched_from_a_site(api: ScriptedApi, typed: Typed) -> None:
    found = {
        "source": "org/[x]",
        "architecture": "",
        "parameters": 0,
        "license": "mit",
        "downloads": 1200,
        "is_gated": True,
    }
    known = found | {
        "source": "org/y",
        "architecture": "LlamaForCausalLM",
        "parameters": 1_230_000_000,
        "is_gated": False,
    }
    api.answers["/manage/hub"] = {"models": [found, known]}
    lines = typed("search", "tiny llama")[0].splitlines()
    assert lines[1].split() == [
        "org/[x]", "not", "supported", "mit", "1,200", "its", "terms", "must", "be", "accepted", "first",
    ]  # fmt: skip
    assert lines[2].split() == ["org/y", "LlamaForCausalLM", "1.23", "G", "mit", "1,200"]
    assert api.sent == [("GET", "/manage/hub?site=ams1&words=tiny+llama", None)]
    assert json.loads(typed("search", "tiny", "--json")[0])[1]["source"] == "org/y"


def test_a_line_for_one_more_machine_is_printed_alone(api: ScriptedApi, typed: Typed) -> None:
    api.answers["/manage/join"] = {"line": "pilotlight join https://here:8443 pj-1"}
    printed, beside = typed("join-line", "--minutes", "5")
    assert printed == "pilotlight join https://here:8443 pj-1\n"
    assert "within 5 minutes" in beside
    assert api.sent == [("POST", "/manage/join", {"minutes": 5.0})]


def test_stores_are_listed_and_read_page_by_page(api: ScriptedApi, typed: Typed) -> None:
    store = {"kind": "d1", "name": "shop", "owner": "f", "bytes": 3 << 20}
    api.answers["/manage/stores"] = {"sites": {"ams1": [store]}, "unread": {"iad1": "too old"}}
    printed, beside = typed("stores")
    assert printed.splitlines()[1].split() == ["ams1", "d1", "shop", "f", "3.00", "MiB"]
    assert beside == "iad1: too old\n"
    page = {"tables": ["goods"], "table": "goods", "columns": ["[red]a", "b"], "rows": [["[b]1", None]], "next": "50"}
    api.answers["/manage/stores/ams1"] = page
    printed, beside = typed("read", "d1", "shop", "--site", "ams1", "--table", "goods")
    assert [line.split() for line in printed.splitlines()] == [["[red]a", "b"], ["[b]1", "NULL"]]
    assert "--after 50" in beside
    assert api.sent[-1][1] == "/manage/stores/ams1?kind=d1&name=shop&table=goods&prefix=&after=&limit=50"
    assert json.loads(typed("read", "d1", "shop", "--json")[0]) == page
