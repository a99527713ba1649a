"""Input of a terminal conversation other than messages: commands, several lines, Ctrl-C."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pilotlight.runtime.cli.api import Api
from pilotlight.runtime.cli.chat import answer, chat, piped
from pilotlight.runtime.cli.cli_error import CliError


class FakeApi(Api):
    """An API that answers with the last word of the message and records requests. The message "stop me" raises KeyboardInterrupt."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.asked: list[list[dict[str, Any]]] = []

    def get_json(self, path: str) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "ember"}, {"id": "llama"}]}
        if path != "/v1/models/ember":
            raise CliError("this site has no model of that name.")
        return {"id": "ember"}

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.asked.append(body["messages"])
        said = body["messages"][-1]["content"]
        said = said if isinstance(said, str) else said[-1]["text"]
        if said == "think":
            for thought in ("Hm.", " Well."):
                yield {"choices": [{"delta": {"reasoning_content": thought}}]}
        yield {"choices": [{"delta": {"content": said.split()[-1]}}]}
        if said == "stop me":
            raise KeyboardInterrupt


def conversation(*typed: str | BaseException, system: str | None = None) -> FakeApi:
    """Type lines at a terminal, and end with Ctrl-D."""
    lines = iter([*typed, EOFError()])

    class Typing(Console):
        def input(self, *_: object, **__: object) -> str:
            line = next(lines)
            if isinstance(line, BaseException):
                raise line
            return line

    api = FakeApi()
    chat(api, None, "ember", system, {}, Typing())
    return api


def contents(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages]


def test_a_conversation_is_sent_whole_with_every_turn() -> None:
    api = conversation("say one", "", "say two", system="Be brief.")
    assert [contents(asked) for asked in api.asked] == [
        ["Be brief.", "say one"],
        ["Be brief.", "say one", "one", "say two"],
    ]


def test_commands_change_the_conversation_and_are_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    api = conversation(
        "say one", "/system Be kind.", "say two", "/clear", "say three", "/system", "/help", "/what",
        "say four", "/bye", "never said",
    )  # fmt: skip
    assert [contents(asked) for asked in api.asked] == [
        ["say one"],
        ["Be kind.", "say one", "one", "say two"],
        ["Be kind.", "say three"],
        ["say three", "three", "say four"],
    ]
    assert "There is no /what." in capsys.readouterr().out


def test_quotes_hold_several_lines() -> None:
    api = conversation('"""first', "", "  last", '"""', '"""all of it"""')
    assert [contents(asked)[-1] for asked in api.asked] == ["first\n\n  last", "all of it"]


def test_ctrl_c_stops_an_answer_or_a_line_and_not_the_program() -> None:
    api = conversation("stop me", KeyboardInterrupt(), "say two")
    assert [contents(asked) for asked in api.asked] == [["stop me"], ["say two"]]


@pytest.mark.parametrize(
    ("is_terminal", "term", "no_color", "shown"),
    [
        (True, "xterm", "", "\x1b[2mHm. Well.\x1b[0m\nthink\n"),
        (True, "xterm", "1", "Hm. Well.\nthink\n"),
        (True, "dumb", "", "Hm. Well.\nthink\n"),
        (False, "xterm", "", "think\n"),
    ],
)
def test_reasoning_is_shown_on_terminals_and_is_no_part_of_the_answer(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    term: str,
    no_color: str,
    shown: str,
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert answer(FakeApi(), {"messages": [{"role": "user", "content": "think"}]}, is_terminal) == "think"
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "\\x1b[2Jred\n"), (False, "\x1b[2Jred\n")])
def test_an_answer_cannot_control_the_terminal(
    capsys: pytest.CaptureFixture[str], is_terminal: bool, shown: str
) -> None:
    asked = {"messages": [{"role": "user", "content": "say \x1b[2Jred"}]}
    assert answer(FakeApi(), asked, is_terminal) == "\x1b[2Jred"
    assert capsys.readouterr().out == shown


def test_a_model_that_is_not_served_is_refused_before_anything_is_typed() -> None:
    with pytest.raises(CliError, match=r"no model of that name\. Served are: ember, llama\."):
        chat(FakeApi(), None, "embr", None, {})


def test_an_image_goes_with_the_next_message_and_stays_in_the_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cat.png").write_bytes(b"meow")
    api = conversation(f"/image {tmp_path}/dog.png", f"/image {tmp_path}/cat.png", "a cat?", "and now?")
    part = {"type": "image_url", "image_url": {"url": "data:;base64,bWVvdw=="}}
    with_image = [part, {"type": "text", "text": "a cat?"}]
    assert [asked[-1]["content"] for asked in api.asked] == [with_image, "and now?"]
    assert api.asked[1][0]["content"] == with_image
    told = capsys.readouterr().out
    assert "cannot be read" in told
    assert "has 1 image." in told


def test_a_prompt_that_is_piped_may_have_bytes_of_another_encoding() -> None:
    assert piped(io.BytesIO(b"caf\xe9 now\n")) == "caf\ufffd now"
    with pytest.raises(CliError, match="There is nothing to ask"):
        piped(io.BytesIO(b" \n"))
