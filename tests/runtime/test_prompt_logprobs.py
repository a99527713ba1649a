"""Log-probabilities of the prompt: vLLM's table in both APIs, and the echo of completions."""

from typing import Any

import pytest
from msgspec.structs import replace

from pilotlight.engine.api.protocol import TokenLogprobs
from tests.asgi import call
from tests.fakes import ids, says
from tests.runtime.conftest import Site

CHAT = "/ai/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "h\u00e9y"}  # four tokens, because one character has two bytes
TOKENS = ids("h\u00e9y")


def with_prompt(steps: list[Any], prompt: tuple[int, ...]) -> list[Any]:
    """Add a report for each prompt token after the first: its log-probability, rank 3, and two likelier tokens."""
    reported = tuple(TokenLogprobs(-2.0, ((1, -0.5), (2, -1.0)), 3) for _ in prompt[1:])
    return [replace(steps[0], prompt_logprobs=reported), *steps[1:]]


async def test_a_completion_has_a_table_of_its_prompt(site: Site) -> None:
    site.engine.script = with_prompt(says("ok"), TOKENS)
    answer = await call(site.app, COMPLETIONS, {**TEXT, "prompt_logprobs": 1})
    sampling = site.engine.submits[0].sampling
    assert (sampling.prompt_logprobs, sampling.num_prompt_logprobs, sampling.num_logprobs) == (True, 1, None)
    table = answer.json["choices"][0]["prompt_logprobs"]
    assert len(table) == 4
    assert table[0] is None
    assert table[3] == {
        str(TOKENS[3]): {"logprob": -2.0, "rank": 3, "decoded_token": "y"},
        "1": {"logprob": -0.5, "rank": 1, "decoded_token": '"'},
    }


async def test_a_chat_has_one_beside_its_choices(site: Site) -> None:
    prompt = ids("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    site.engine.scripts = [with_prompt(says("ok"), prompt), says("no")]
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0, "n": 2}
    answer = await call(site.app, CHAT, body)
    assert len(answer.json["choices"]) == 2
    table = answer.json["prompt_logprobs"]
    assert table[0] is None
    assert [list(entry) for entry in table[1:]] == [[str(token)] for token in prompt[1:]]
    assert [submit.sampling.prompt_logprobs for submit in site.engine.submits] == [True, False]
    plain = await call(site.app, CHAT, {**body, "prompt_logprobs": None})
    assert "prompt_logprobs" not in plain.json


@pytest.mark.parametrize("prompt", ["h\u00e9y", list(TOKENS)])
async def test_an_echo_puts_the_prompt_before_the_answer(site: Site, prompt: Any) -> None:
    answer = await call(site.app, COMPLETIONS, {**TEXT, "prompt": prompt, "echo": True})
    assert answer.json["choices"][0]["text"] == "h\u00e9yHello, world"
    assert answer.json["choices"][0]["logprobs"] is None
    assert not site.engine.submits[0].sampling.prompt_logprobs
    assert answer.json["usage"]["completion_tokens"] == 13


async def test_an_echo_with_logprobs_has_those_of_both(site: Site) -> None:
    site.engine.script = with_prompt(says("ok", logprobs=True), TOKENS)
    answer = await call(site.app, COMPLETIONS, {**TEXT, "echo": True, "logprobs": 1})
    assert site.engine.submits[0].sampling.num_prompt_logprobs == 1
    (choice,) = answer.json["choices"]
    assert choice["text"] == "h\u00e9yok"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][-3:] == ["y", "o", "k"]
    assert logprobs["token_logprobs"] == [None, -2.0, -2.0, -2.0, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"y": -2.0, '"': -0.5}, "the token that is there, among the likeliest or not"
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
    assert "prompt_logprobs" not in choice


async def test_both_kinds_at_once_are_each_as_long_as_asked(site: Site) -> None:
    site.engine.script = with_prompt(says("ok", logprobs=True), TOKENS)
    answer = await call(site.app, COMPLETIONS, {**TEXT, "echo": True, "logprobs": 1, "prompt_logprobs": 2})
    assert site.engine.submits[0].sampling.num_prompt_logprobs == 2
    (choice,) = answer.json["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2
    assert len(choice["prompt_logprobs"][1]) == 3


async def test_an_echo_streams_each_choice_after_the_prompt(site: Site) -> None:
    late = [0.03, *with_prompt(says("one", logprobs=True), TOKENS)]
    site.engine.scripts = [late, says("two", logprobs=True)]  # the second choice comes before the prompt's logprobs
    answer = await call(site.app, COMPLETIONS, {**TEXT, "echo": True, "logprobs": 0, "n": 2, "stream": True})
    for index, text in enumerate(["h\u00e9yone", "h\u00e9ytwo"]):
        chosen = [e["choices"][0] for e in answer.events[:-1] if e["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in chosen) == text
        offsets = [offset for choice in chosen for offset in choice["logprobs"]["text_offset"]]
        assert offsets == [0, 1, 1, 2, 3, 4, 5]
        assert chosen[0]["logprobs"]["token_logprobs"][:2] == [None, -2.0]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_alone_can_be_asked_for(site: Site, stream: bool) -> None:
    site.engine.script = with_prompt([*says("x", finish=None, logprobs=True), 30], TOKENS)
    body = {**TEXT, "echo": True, "logprobs": 1, "max_tokens": 0, "stream": stream}
    answer = await call(site.app, COMPLETIONS, body)
    choice = (answer.events[0] if stream else answer.json)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("h\u00e9y", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0, -2.0, -2.0]
    if not stream:
        assert answer.json["usage"]["completion_tokens"] == 0
    assert site.engine.submits[0].sampling.max_tokens == 1


async def test_an_engine_that_keeps_the_numbers_to_itself_is_an_error(site: Site) -> None:
    answer = await call(site.app, COMPLETIONS, {**TEXT, "prompt_logprobs": 1})
    assert answer.status == 500
    assert "without the prompt's logprobs" in answer.json["error"]["message"]
