"""The prose lint finds each pattern of hard sentences, and accepts plain ones."""

from pathlib import Path

import pytest

from load_tests.prose import BUDGET, PACKAGES, Place, findings, pages, prose


def found(text: str, kind: str = "comment") -> list[str]:
    return [one.pattern for one in findings(iter([Place("wire/x.py", 1, kind, text)]))]


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("headless clause", "of what was asked before"),
        ("headless clause", "Who waits gets an error."),
        ("told, says", "the client is told"),
        ("behind, begun", "a stream that has begun"),
        ("behind, begun", "the queue behind it"),
        ("elliptical genitive", "each has a folder of its own"),
        ("None: as grammar", "Return the site; None: it is unknown."),
        ("modal prophecy", "the answer is to go on at the next site"),
        ("nobody, whoever", "for whoever asks"),
        ("comes of it", "counted, whatever comes of it"),
    ],
)
def test_each_pattern_is_found(pattern: str, text: str) -> None:
    assert pattern in found(text)


@pytest.mark.parametrize(
    "text",
    [
        "Return the blocks that hold the prefix, in order; None if a block is missing.",
        "Tell whether the site is healthy.",
        "A missing header is None, as in the platform's SDK.",
        "Wait for the next event, at most `timeout_s` seconds.",
    ],
)
def test_plain_sentences_are_left_alone(text: str) -> None:
    assert found(text, "docstring") == []


def test_a_docstring_begins_with_a_verb_or_the_thing_and_is_short() -> None:
    assert found("Of the sites that answer.", "docstring") == ["fragment"]
    assert found(f"Return {'a long ' * 20}line.", "docstring") == ["long summary"]


def test_docstrings_comments_and_messages_are_prose_and_code_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "wire"
    folder.mkdir()
    text = '"""A module."""\n\n# One comment\n# of two lines.\nKEY = "not.a.sentence"\nNAME = "f"\nsay = f"a sentence of {NAME} that users read"\n'
    (folder / "x.py").write_text(text)
    places = {(place.kind, place.text) for place in prose("wire", tmp_path)}
    assert places == {
        ("docstring", "A module."),
        ("comment", "One comment of two lines."),
        ("message", "a sentence of X that users read"),
    }
    (tmp_path / "README.md").write_text("# Title\n\nA `code word` here.\n\n```console\n$ who waits\n```\n")
    assert [place.text for place in pages(tmp_path)] == ["Title", "A `x` here."]


def test_every_package_has_a_budget() -> None:
    assert set(BUDGET) == {*PACKAGES, "Markdown"}
