"""Decisions at a site: the form in each dialect, a tree of tokens after one state, and equality with plain forward passes."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pilotlight.dialects.decisions.openai_decisions import parse_decisions
from pilotlight.engine.api.protocol import Submit, TokenLogprobs, TokenOutput
from tests.asgi import call
from tests.checkpoints import write_llama
from tests.fakes import EOS, TOKENIZER, ids
from tests.runtime.conftest import Site
from tests.runtime.test_real_engine import Process

PREDICATE = {"type": "predicate", "name": "wet", "instructions": "It rains."}
CHOICE = {
    "type": "choice", "name": "sky", "instructions": "Which sky?",
    "choices": [{"value": "grey", "description": "clouds"}, {"value": "blue"}, {"value": True}],
}  # fmt: skip
SCORE = {
    "type": "score",
    "instructions": "How wet?",
    "levels": [{"label": "dry"}, {"label": "wet", "description": "soaked"}],
}
ASKED: dict[str, Any] = {"model": "tiny", "input": "It pours.", "questions": [PREDICATE, CHOICE, SCORE]}
STATE: dict[str, Any] = {
    "model": "tiny", "state": {"sky": "grey"},
    "questions": {
        "wet": {"type": "noul", "instructions": "It rains.", "criteria": {"true": "drops fall"}},
        "sky": {"type": "choice", "instructions": {"question": "Which?"}, "criteria": {"grey": "clouds", "blue": None}},
        "depth": {"type": "score", "instructions": "How wet?", "criteria": ["dry", "wet", "soaked"]},
    },
}  # fmt: skip
LIKELY = {"yes": 0.9, "no": 0.1, "grey": 0.5, "blue": 0.25, "true": 0.25, "0": 0.2, "1": 0.8, "2": 0.0001}


def scored(submit: Submit) -> list[Any]:
    """Return scores with which each label has its probability, all of it at the label's first token."""
    start = submit.sampling.prompt_logprobs_from
    label = TOKENIZER.decode(submit.prompt_token_ids[start:])
    rest = len(submit.prompt_token_ids) - start - 1
    reported = [TokenLogprobs(math.log(LIKELY[label])), *[TokenLogprobs(0.0)] * rest]
    return [TokenOutput("", (EOS,), "stop", 3, prompt_logprobs=tuple(reported))]


async def test_openais_answers_are_in_their_questions_order(site: Site) -> None:
    site.engine.answer = scored
    body = (await call(site.app, "/v1/decisions", ASKED)).json
    wet, sky, depth = body["answers"]
    assert (wet["type"], wet["name"], wet["probability"]) == ("predicate", "wet", pytest.approx(0.9))
    assert (sky["choice"], [each["value"] for each in sky["probabilities"]]) == ("grey", ["grey", "blue", True])
    assert sky["confidence"] == pytest.approx(0.25)
    assert (depth["name"], depth["score"]) == (None, pytest.approx(0.8))
    assert depth["probabilities"][1] == {"label": "wet", "probability": pytest.approx(0.8), "value": 1}
    usage = body["usage"]
    assert usage["input_tokens"] == usage["total_tokens"] > usage["input_tokens_details"]["cached_tokens"] == 3


async def test_system_ones_answers_have_their_questions_names(site: Site) -> None:
    site.engine.answer = scored
    body = (await call(site.app, "/v1/systemone", STATE)).json
    answers = body["answers"]
    assert answers["wet"] == {"type": "noul", "noul": pytest.approx(0.9)}
    assert (answers["sky"]["choice"], sum(answers["sky"]["probabilities"].values())) == ("grey", pytest.approx(1.0))
    assert answers["depth"]["legend"] == {"0": "dry", "1": "wet", "2": "soaked"}
    assert answers["depth"]["score"] == pytest.approx(0.8, abs=0.01)
    run = (await call(site.app, "/client/v4/accounts/a/ai/run/@test/tiny", STATE)).json
    assert (run["success"], run["result"]["answers"]["wet"]) == (True, answers["wet"])
    assert run["result"]["usage"]["input_tokens"] == body["usage"]["input_tokens"]


async def test_all_questions_begin_with_the_state_and_a_leaf_reports_its_option_alone(site: Site) -> None:
    site.engine.answer = scored
    await call(site.app, "/v1/decisions", ASKED)
    begin = ids("<|im_start|>user\nIt pours.\n\n")
    for submit in site.engine.submits:
        assert submit.prompt_token_ids[: len(begin)] == begin
        assert submit.sampling.prompt_logprobs_from < len(submit.prompt_token_ids)
    assert len(site.engine.submits) == 7


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [{"type": "choice", "instructions": "x"}]}, "questions[0].choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": True}, {"value": "true"}]}]}, "questions[0].choices"),
        ({"questions": [{**SCORE, "levels": [{"label": "one"}]}]}, "questions[0].levels"),
        ({"questions": [{"type": "predicate", "instructions": ""}]}, "questions[0].instructions"),
        ({"questions": [{"type": "rank", "instructions": "x"}]}, "questions[0].type"),
        ({"input": []}, "input"),
        ({"model": "other"}, "model"),
    ],
)
async def test_a_wrong_question_is_named(site: Site, wrong: dict[str, Any], param: str) -> None:
    answer = await call(site.app, "/v1/decisions", {**ASKED, **wrong})
    assert answer.status in (400, 404)
    assert answer.json["error"]["param"] == param, answer.body


@pytest.mark.parametrize(
    ("question", "field"),
    [
        ({"type": "noul"}, "instructions"),
        ({"type": "noul", "instructions": "x", "criteria": {"maybe": "y"}}, "criteria"),
        ({"type": "choice", "instructions": "x", "criteria": {}}, "criteria"),
        ({"type": "score", "instructions": "x", "criteria": "y"}, "criteria"),
        ({"type": "box", "instructions": "x"}, "type"),
    ],
)
async def test_a_wrong_question_of_system_one_is_named(site: Site, question: dict[str, Any], field: str) -> None:
    answer = await call(site.app, "/v1/systemone", {**STATE, "questions": {"q": question}})
    assert (answer.status, answer.json["error"]["param"]) == (400, f"questions.q.{field}")


async def test_an_input_of_messages_may_hold_json_and_calls(site: Site) -> None:
    site.engine.answer = scored
    items = [
        {"role": "user", "content": [{"type": "input_json", "data": {"a": 1}}, {"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
    ]
    answer = await call(site.app, "/v1/decisions", {**ASKED, "input": items, "questions": [PREDICATE]})
    assert answer.status == 200, answer.body
    assert '{"a":1}\nHi' in TOKENIZER.decode(site.engine.submits[0].prompt_token_ids)


# The tests below use real weights.

HERE = Path(__file__).parents[2] / "engine" / "embedded" / "ember"
LONG = "The gas stove has a pilot light that burns small and blue. " * 8
REAL = {
    "model": "tiny", "input": LONG,
    "questions": [
        PREDICATE, CHOICE, SCORE,
        {"type": "choice", "instructions": "How?", "choices": [{"value": v} for v in ("not", "not sure", "surely not today", "warm water")]},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def process(process_tier: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    directory = tmp_path_factory.mktemp("decisions")
    write_llama(directory / "tiny", vocab_size=2048, max_position_embeddings=2048, eos_token_id=2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / "tiny" / name).write_bytes((HERE / name).read_bytes())
    file = directory / "ams1.toml"
    file.write_text(
        'name = "ams1"\nplace = {city = "A", latitude = 0.0, longitude = 0.0}\n[listen]\nport = 0\n'
        '[engine]\ndevice = "cpu"\nthreads = 1\nkv_gib = 0.05\nstandby = false\n'
        f'[[models]]\nname = "tiny"\nsource = "{directory}/tiny"\n'
    )
    started = Process(file, directory / "log")
    yield started
    started.stop()


def plain_passes(directory: Path, asked: dict[str, Any]) -> list[list[float]]:
    """Return the options' probabilities, computed by one forward pass per option without a cache."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    request = parse_decisions(json.dumps(asked).encode(), lambda name: name)
    found = []
    for question in request.questions:
        text = tokenizer.apply_chat_template(
            list(request.asked(question).messages), tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer.encode(text, add_special_tokens=False)
        options = [tokenizer.encode(option.label, add_special_tokens=False) for option in question.options]
        if any(a != b and b[: len(a)] == a for a in options for b in options):
            options = [[*tokens, 2] for tokens in options]
        scores = []
        for tokens in options:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
            scores.append(sum(float(logits[len(prompt) + i - 1, token]) for i, token in enumerate(tokens)))
        found.append(torch.tensor(scores, dtype=torch.float64).softmax(0).tolist())
    return found


def told(process: Process, asked: dict[str, Any]) -> list[list[float]]:
    body = httpx.post(process.url + "/v1/decisions", json=asked, timeout=60).json()
    found = []
    for answer in body["answers"]:
        if answer["type"] == "predicate":
            found.append([answer["probability"], 1 - answer["probability"]])
        else:
            found.append([each["probability"] for each in answer["probabilities"]])
    return found


def test_probabilities_are_those_of_plain_forward_passes(process: Process) -> None:
    expected = plain_passes(process.log.parent / "tiny", REAL)
    found = told(process, REAL)
    worst = max(
        abs(a - b) for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True)
    )
    assert worst <= 1e-4, (found, expected)


def test_probabilities_depend_on_no_other_question_and_on_no_order(process: Process) -> None:
    together = told(process, REAL)
    backwards = told(process, {**REAL, "questions": REAL["questions"][::-1]})[::-1]
    alone = [told(process, {**REAL, "questions": [question]})[0] for question in REAL["questions"]]
    for others in (backwards, alone):
        for mine, theirs in zip(together, others, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)


def test_a_state_is_cached_for_the_next_request(process: Process) -> None:
    asked = {**REAL, "input": "Warm water for a hot meal. " * 12}
    bodies = [httpx.post(process.url + "/v1/decisions", json=asked, timeout=60).json() for _ in range(2)]
    first, second = [body["usage"]["input_tokens_details"]["cached_tokens"] for body in bodies]
    assert first == 0
    assert second >= 64
    assert bodies[0]["answers"][1]["choice"] == bodies[1]["answers"][1]["choice"]
