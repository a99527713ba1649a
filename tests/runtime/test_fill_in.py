"""Completions between a prompt and a suffix, by models whose vocabulary has tokens for that."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import AddedToken, Tokenizer

from pilotlight.engine.api.protocol import TokenOutput
from pilotlight.engine.text.fill_in import FillIn
from tests.asgi import call
from tests.fakes import EOS, FakeEngineClient, FakeLauncher, ids, says
from tests.runtime.conftest import Site, SiteMaker

pytestmark = pytest.mark.process

COMPLETIONS, GENERATE, SHOW = "/v1/completions", "/api/generate", "/api/show"
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>")
ASKED: dict[str, Any] = {"model": "tiny", "prompt": "a = ", "suffix": "\nb"}


@pytest.fixture
def token_ids(model_directory: Path) -> dict[str, int]:
    """Add Qwen's tokens to the model's vocabulary, and return their ids."""
    path = str(model_directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in QWEN])
    tokenizer.save(path)
    known = {text: tokenizer.token_to_id(text) for text in QWEN}
    return {text: token_id for text, token_id in known.items() if token_id is not None}


def launcher() -> FakeLauncher:
    def widen(engine: FakeEngineClient) -> None:
        engine.vocab_size += len(QWEN)

    return FakeLauncher(widen)


async def test_the_prompt_has_both_parts_in_the_models_form(make_site: SiteMaker, token_ids: dict[str, int]) -> None:
    prefix, suffix, middle, _, _ = token_ids.values()
    async with make_site(launcher=launcher()) as site:
        site.engine.script = says("1")
        answer = await call(site.app, COMPLETIONS, {**ASKED, "prompt": ["a = ", "<|im_end|>"], "stop_token_ids": [7]})
        assert [choice["text"] for choice in answer.json["choices"]] == ["1", "1"]
        first, second = site.engine.submits
        assert first.prompt_token_ids == (prefix, *ids("a = "), suffix, *ids("\nb"), middle)
        assert EOS not in second.prompt_token_ids  # a special token in a client's text is text
        assert {7, *token_ids.values()} <= {*first.sampling.stop_token_ids}


async def test_tokens_that_end_the_inserted_text_are_no_part_of_it(
    make_site: SiteMaker, token_ids: dict[str, int]
) -> None:
    async with make_site(launcher=launcher()) as site:
        (output,) = says("1", per_step=9, finish=None)
        assert isinstance(output, TokenOutput)
        ended = replace(output, token_ids=(*output.token_ids, token_ids["<|fim_pad|>"]), finish_reason="stop")
        site.engine.script = [ended]
        (choice,) = (await call(site.app, COMPLETIONS, ASKED)).json["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("1", "stop")


async def test_ollamas_clients_insert_too(make_site: SiteMaker, token_ids: dict[str, int]) -> None:
    async with make_site(launcher=launcher()) as site:
        answer = await call(site.app, GENERATE, {**ASKED, "stream": False})
        assert answer.json["response"] == "Hello, world"
        assert site.engine.submits[0].prompt_token_ids[0] == token_ids["<|fim_prefix|>"]
        shown = (await call(site.app, SHOW, {"model": "tiny"})).json
        assert ("insert" in shown["capabilities"], ".Suffix" in shown["template"]) == (True, True)


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
async def test_a_model_without_such_tokens_refuses_by_name(site: Site, path: str) -> None:
    answer = await call(site.app, path, ASKED)
    assert answer.status == 400
    assert b"vocabulary has no tokens for filling in the middle" in answer.body
    assert site.engine.submits == []
    assert (await call(site.app, path, {**ASKED, "suffix": ""})).status == 200
    assert "insert" not in (await call(site.app, SHOW, {"model": "tiny"})).json["capabilities"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"echo": True}, b"echo"), ({"prompt": [1, 2]}, b"token ids"), ({"suffix": 3}, b"suffix")],
)
async def test_what_a_suffix_cannot_be_combined_with_is_refused(
    site: Site, fields: dict[str, Any], words: bytes
) -> None:
    answer = await call(site.app, COMPLETIONS, {**ASKED, **fields})
    assert (answer.status, answer.json["error"]["param"], words in answer.body) == (400, "suffix", True)


@pytest.mark.parametrize(
    ("vocabulary", "prompt"),
    [
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>",
        ),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]b[PREFIX]a"),
        (("[PREFIX]",), None),
    ],
)
def test_each_vocabulary_has_its_form(vocabulary: tuple[str, ...], prompt: str | None) -> None:
    found = FillIn.of_vocabulary(lambda text: vocabulary.index(text) if text in vocabulary else None)
    assert (found and found.prompt("a", "b")) == prompt
    assert found is None or found.end_token_ids == tuple(range(len(vocabulary)))


async def test_a_stop_string_that_is_text_is_no_stop_token(make_site: SiteMaker, token_ids: dict[str, int]) -> None:
    async with make_site(launcher=launcher()) as site:
        body = {"model": "tiny", "prompt": "a", "stop": ["<|file_sep|>", "<|im_start|>"]}
        assert (await call(site.app, COMPLETIONS, body)).status == 200
        assert site.engine.submits[0].sampling.stop_token_ids == ids("<|im_start|>")
        assert token_ids["<|file_sep|>"] not in site.engine.submits[0].sampling.stop_token_ids


async def test_a_streamed_answer_is_the_same(make_site: SiteMaker, token_ids: dict[str, int]) -> None:
    assert token_ids
    async with make_site(launcher=launcher()) as site:
        whole = (await call(site.app, COMPLETIONS, ASKED)).json["choices"][0]["text"]
        streamed = await call(site.app, COMPLETIONS, {**ASKED, "stream": True})
        assert "".join(event["choices"][0]["text"] for event in streamed.events[:-1]) == whole
