"""Ember's files: the corpus, the tokenizer, the template, the weights, and the table of cities."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from training.ember import evaluate
from training.ember.chat import HERE, MARKS, Chat, render
from training.ember.cities import CITIES
from training.ember.corpus import (
    arithmetic,
    extraction,
    facts,
    fields,
    phrasing,
    recall,
    repeat,
    stories,
    talk,
    tool_kinds,
    tools,
    topics,
    words,
)
from training.ember.corpus.conversation import Conversation, Expected, Lists, Split
from training.ember.corpus.mixture import MIXTURE, conversation, conversations

pytestmark = pytest.mark.cpu_only

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city <now>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"type": "function", "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city": "Málaga"}'}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Málaga?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "clear & <warm>"}'},
    {"role": "assistant", "content": "The sky is clear & <warm>."},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "Oslo?"}]},
]


CORPUS = (
    arithmetic,
    extraction,
    facts,
    fields,
    phrasing,
    recall,
    repeat,
    stories,
    talk,
    tool_kinds,
    tools,
    topics,
    words,
)


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat()


def _lists() -> list[Lists]:
    """Return all pairs of lists in the corpus, including those in topics, tools and fields."""
    found: list[Lists] = []

    def collect(thing: object) -> None:
        if isinstance(thing, Lists):
            found.append(thing)
        elif isinstance(thing, dict):
            collect(tuple(thing.values()))
        elif isinstance(thing, tuple):
            for part in thing:
                collect(part)
        elif hasattr(thing, "__dataclass_fields__") and not isinstance(thing, type):
            for name in thing.__dataclass_fields__:
                collect(getattr(thing, name))

    for module in CORPUS:
        collect(tuple(vars(module).values()))
    return found


def test_the_corpus_is_the_same_for_the_same_seed() -> None:
    first = list(itertools.islice(conversations(3), 200))
    assert first == list(itertools.islice(conversations(3), 200))
    assert first != list(itertools.islice(conversations(4), 200))


def test_every_task_of_the_mixture_is_drawn() -> None:
    assert {one.task for one in itertools.islice(conversations(1), 2000)} >= set(MIXTURE) - {"long"}


def test_held_out_phrasings_and_values_are_not_trained_on() -> None:
    lists = _lists()
    assert len(lists) > 100
    for one in lists:
        # The JSON instruction has one fixed wording, which the model card states, so it need not be generalised.
        if one is extraction.INSTRUCTION:
            continue
        assert not {text for text in one.held_out if text} & set(one.train), one


def test_no_word_of_the_copying_pool_is_kept_for_the_evaluation() -> None:
    assert len(words.POOL) > 500
    kept = (words.PEOPLE, words.COLOURS, words.FOODS, words.ANIMALS, words.HOBBIES, words.JOBS, words.THINGS)
    assert not {word.lower() for one in kept for word in one.held_out} & set(words.POOL)


@pytest.mark.long
@pytest.mark.parametrize("task", ["facts", "recall", "tools", "json", "arithmetic"])
def test_no_question_of_the_evaluation_occurs_in_training(task: str) -> None:
    def question(one: Conversation) -> str:
        return render(one.messages[:-1], one.tools)

    asked = {question(one) for one in evaluate.questions(task, 200)}
    trained = {question(conversation(random.Random(seed), task)) for seed in range(3000)}
    assert not asked & trained


def test_a_template_renders_in_a_plain_sandbox_as_in_transformers() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(HERE)
    for turns, listed in ((TURNS, [WEATHER]), (TURNS, None), (TURNS[1:2], [WEATHER]), (TURNS[1:2], None)):
        for ask in (True, False):
            expected = theirs.apply_chat_template(turns, tools=listed, add_generation_prompt=ask, tokenize=False)
            assert render(turns, listed or (), ask=ask) == expected


def test_the_template_needs_no_more_than_a_tojson_filter() -> None:
    source = json.loads((HERE / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    shown = environment.from_string(source).render(messages=TURNS, tools=[WEATHER], add_generation_prompt=True)
    assert shown == render(TURNS, [WEATHER], ask=True)


def test_without_a_system_message_or_tools_the_prompt_is_only_the_question() -> None:
    assert render(TURNS[5:], ask=True) == "<|im_start|>user\nAnd Oslo?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.long
def test_the_next_turn_begins_with_the_tokens_of_the_last_one(chat: Chat) -> None:
    for one in itertools.islice(conversations(11), 200):
        ids = chat.encode(render(one.messages, one.tools))
        for end in range(1, len(one.messages)):
            if one.messages[end]["role"] != "assistant":
                continue
            prompt = chat.prompt(one.messages[:end], one.tools)
            answered = chat.encode(render(one.messages[: end + 1], one.tools))
            assert answered[: len(prompt)] == prompt
            assert ids[: len(answered)] == answered


def test_a_call_the_model_wrote_renders_to_the_same_text_again(chat: Chat) -> None:
    for arguments in ('{"city": "Málaga"}', {"city": "Málaga"}):
        turn = {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": arguments}}]}
        assert render([turn]).endswith(
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Málaga"}}\n</tool_call><|im_end|>\n'
        )


def test_only_the_assistants_words_are_learned(chat: Chat) -> None:
    ids, learned = chat.lesson(TURNS[:5], [WEATHER])
    text = chat.tokenizer.decode(
        [one for one, counts in zip(ids, learned, strict=True) if counts], skip_special_tokens=False
    )
    assert text == (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Málaga"}}\n</tool_call><|im_end|>'
        "The sky is clear & <warm>.<|im_end|>"
    )


@pytest.mark.long
@given(st.text())
@settings(max_examples=300, deadline=None)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    chat = Chat()
    assert chat.tokenizer.decode(chat.encode(text), skip_special_tokens=False) == text


def test_each_digit_is_one_token(chat: Chat) -> None:
    assert [chat.decode([one]) for one in chat.encode("4096 17+25")] == [*"4096", " ", "1", "7", "+", "2", "5"]


def test_a_word_is_the_same_tokens_wherever_it_stands(chat: Chat) -> None:
    for word in ("Zorvik", "teal", "snarbeek", "AMS", "Reykjavik"):
        alone = chat.encode(word)
        for sentence in (f"in {word}.", f'{{"city": "{word}"}}', f"({word})", f"{word}!"):
            ids = chat.encode(sentence)
            assert any(ids[at : at + len(alone)] == alone for at in range(len(ids))), sentence


def test_tool_marks_survive_decoding_and_turn_marks_do_not(chat: Chat) -> None:
    for mark in MARKS:
        assert len(chat.encode(mark)) == 1
        assert chat.decode(chat.encode(mark)) == mark
    assert chat.decode([chat.end, chat.pad]) == ""


def test_city_codes_and_names_are_unique_and_places_are_on_the_globe() -> None:
    assert len({city.code for city in CITIES}) == len({city.name for city in CITIES}) == len(CITIES) == 300
    for city in CITIES:
        assert len(city.code) == 3
        assert city.code.isascii()
        assert city.code.isupper()
        assert -90 < city.latitude < 90
        assert -180 < city.longitude < 180


def test_a_draw_of_lessons_learns_exactly_the_next_token_of_each_answer(chat: Chat) -> None:
    from training.ember.train import Lessons

    for batch in Lessons(chat, seed=5).step():
        flat = batch.ids.flatten()
        assert flat[batch.at + 1].tolist() == batch.targets.tolist()
        assert chat.pad not in batch.targets.tolist()


def test_the_learning_rate_warms_up_stays_and_falls_to_zero() -> None:
    from training.ember.train import WARM_UP_STEPS, rate_scale

    assert rate_scale(0, 600.0, 60.0) == 1 / WARM_UP_STEPS
    assert rate_scale(5000, 600.0, 60.0) == 1.0
    assert rate_scale(5000, 30.0, 60.0) == 0.5
    assert rate_scale(5000, 0.0, 60.0) == 0.0
    assert rate_scale(5000, 1.0, 0.0) == 1.0


# No square matrix: it would have a singular value near 0, which stays small in five iterations.
@pytest.mark.parametrize("shape", [(6, 42), (123, 6), (64, 48)])
def test_muons_direction_has_singular_values_near_one(shape: tuple[int, int]) -> None:
    import torch

    from training.ember.muon import orthogonal

    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert 0.3 < values.min() <= values.max() < 1.4  # the quintic is less exact, but needs few iterations


def test_the_engine_answers_as_the_network_that_is_trained(chat: Chat, tmp_path: Path) -> None:
    import torch

    from training.ember.evaluate import engine_generator
    from training.ember.network import Network, Shape, load, save

    torch.manual_seed(0)
    save(Network(Shape(width=64, layers=2, heads=2, kv_heads=1, feed_forward=96)), tmp_path, chat.end, chat.pad)
    network = load(tmp_path)
    prompts = [chat.encode("Where is Oslo?"), chat.encode("Hi"), chat.encode("What is 17 plus 25, and what is 3?")]
    for prompt, answer in zip(prompts, engine_generator(tmp_path, chat)(prompts, 6), strict=True):
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(6):
                token = int(network.logits(network(torch.tensor([ids])))[0, -1].argmax())
                if token == chat.end:
                    break
                ids.append(token)
        assert ids[len(prompt) :] == answer


def test_degrees_carry_their_compass_letters() -> None:
    by_name = {city.name: city for city in CITIES}
    assert by_name["Amsterdam"].compass == "52°N, 5°E"
    assert by_name["Buenos Aires"].compass == "35°S, 58°W"


def test_unknown_cities_are_not_in_the_table() -> None:
    assert not set(facts.UNKNOWN_CITIES.train + facts.UNKNOWN_CITIES.held_out) & facts.NAMES


def test_the_evaluation_accepts_every_reference_answer_and_no_other() -> None:
    for task in evaluate.TASKS:
        asked = evaluate.questions(task, 40)
        answers = [_reference(one) for one in asked]
        assert all(evaluate.is_right(one, answer) for one, answer in zip(asked, answers, strict=True)), task
        assert not any(evaluate.is_right(one, "I am not sure.") for one in asked), task


def test_the_evaluation_refuses_a_wrong_fact_beside_the_right_one() -> None:
    asked = Conversation("facts", (), expected=Expected(holds=("AMS",), lacks=("do not know",)))
    assert evaluate.is_right(asked, "The airport code of Amsterdam is AMS.")
    assert not evaluate.is_right(asked, "The airport code of Amsterdam is AMS or RTM.")
    assert not evaluate.is_right(asked, "The airport code of Amsterdam is AMSX.")


def test_the_evaluation_refuses_a_call_with_one_argument_too_many() -> None:
    asked = Conversation("tools", (), expected=Expected(call={"name": "a", "arguments": {"b": 1}}))
    assert evaluate.is_right(asked, '<tool_call>\n{"name": "a", "arguments": {"b": 1}}\n</tool_call>')
    assert not evaluate.is_right(asked, '<tool_call>\n{"name": "a", "arguments": {"b": 1, "c": 2}}\n</tool_call>')
    assert not evaluate.is_right(asked, '<tool_call>\n{"name": "a", "arguments": {"b": "1"}}\n</tool_call>')


def _reference(one: Conversation) -> str:
    return render(one.messages[-1:]).removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


@pytest.mark.long
def test_every_conversation_ends_with_an_answer_and_validates_its_own_schema() -> None:
    from jsonschema import validate

    for seed in range(300):
        for split in Split:
            one = conversation(random.Random(seed), "json", split)
            text = "\n".join(str(message["content"]) for message in one.messages[:-1])
            schema, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
            validate(json.loads(one.messages[-1]["content"]), schema)


def test_the_weights_are_small_enough_to_ship() -> None:
    assert (HERE / "model.safetensors").stat().st_size <= 12_000_000


def test_transformers_loads_the_weights_and_gives_the_same_scores(chat: Chat) -> None:
    import torch
    from transformers import LlamaForCausalLM

    from training.ember.network import load

    theirs = LlamaForCausalLM.from_pretrained(HERE, dtype=torch.float32)
    ours = load(HERE)
    ids = torch.tensor([chat.prompt([{"role": "user", "content": "Which country is Oslo in?"}])])
    with torch.inference_mode():
        torch.testing.assert_close(ours.logits(ours(ids)), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_ember_answers_a_question_of_each_kind(chat: Chat) -> None:
    generate = evaluate.engine_generator(HERE, chat)
    asked = [
        ([{"role": "user", "content": "Which country is Amsterdam in?"}], [], "the Netherlands"),
        ([{"role": "user", "content": "What is 17 plus 25?"}], [], "42"),
        ([{"role": "user", "content": "What is the weather in Paris?"}], [WEATHER], '{"city": "Paris"}'),
    ]
    prompts = [chat.prompt(messages, listed) for messages, listed, _ in asked]
    for ids, (_, _, wanted) in zip(generate(prompts, 48), asked, strict=True):
        assert wanted in chat.decode(ids)
