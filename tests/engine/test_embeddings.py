"""Embeddings compared with `transformers` and plain pooling, along every path of the scheduler."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import Submit
from pilotlight.engine.weights.pooling_recipe import read_recipe
from tests.checkpoints import write_llama
from tests.embedders import DECODERS, EMBEDDERS, Embedder, reference, write_embedder, write_recipe
from tests.engine.driver import Heard, drain, load_engine, one, random_prompt, submit

TOLERANCE = 1e-4
Written = tuple[Path, Embedder, PreTrainedModel]


@pytest.fixture(scope="module", params=EMBEDDERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory, embedder = tmp_path_factory.mktemp("embedder"), EMBEDDERS[request.param]
    return directory, embedder, write_embedder(directory, embedder)


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory, embedder = tmp_path_factory.mktemp("embedder"), EMBEDDERS[request.param]
    return directory, embedder, write_embedder(directory, embedder)


def embed(name: str, prompt: list[int], embedder: Embedder) -> Submit:
    return submit(name, prompt, pooling=embedder.pooling)


def assert_agrees(heard: Heard, expected: torch.Tensor) -> None:
    assert heard.error is None
    assert heard.embedding is not None
    assert (heard.token_ids, heard.finish_reason, heard.num_outputs) == ([], "stop", 1)
    assert (torch.tensor(heard.embedding) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 77, 96])
def test_a_whole_text_agrees(written: Written, length: int) -> None:
    directory, embedder, model = written
    engine = load_engine(directory)
    assert (engine.info.pooling, engine.info.embedding_size) == (embedder.pooling, embedder.vector_size)
    prompt = random_prompt(length, seed=1)
    assert_agrees(one(engine, embed("a", prompt, embedder)), reference(model, embedder, prompt))


def test_texts_in_one_batch_agree_each_for_itself(written: Written) -> None:
    directory, embedder, model = written
    engine = load_engine(directory, max_num_batched_tokens=64)
    prompts = {str(n): random_prompt(n, seed=n) for n in (1, 4, 5, 33, 70)}
    heard = drain(engine, [embed(name, prompt, embedder) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert_agrees(heard[name], reference(model, embedder, prompt))


@pytest.mark.parametrize("budget", [1, 7, 16, 50])
def test_a_chunked_text_agrees(decoder: Written, budget: int) -> None:
    directory, embedder, model = decoder
    prompt = random_prompt(61, seed=2)
    heard = one(load_engine(directory, max_num_batched_tokens=budget), embed("a", prompt, embedder))
    assert_agrees(heard, reference(model, embedder, prompt))


def test_a_cached_prefix_is_used_only_where_the_pooling_allows_it(decoder: Written) -> None:
    directory, embedder, model = decoder
    engine = load_engine(directory)
    prompt = random_prompt(64, seed=3)
    longer = prompt + random_prompt(21, seed=4)
    for name, text in (("a", prompt), ("b", prompt), ("c", longer)):
        assert_agrees(one(engine, embed(name, text, embedder)), reference(model, embedder, text))
    assert engine.load().prefix_hits == (48 + 64 if embedder.pooling == "last" else 0)


def test_preempted_texts_agree(decoder: Written) -> None:
    directory, embedder, model = decoder
    engine = load_engine(directory, kv_tokens=96, max_num_batched_tokens=20)
    prompts = {str(n): random_prompt(n, seed=n) for n in (40, 41, 42)}
    for name, prompt in prompts.items():
        engine.submit(embed(name, prompt, embedder))
    engine.step()
    running = engine.scheduler.running[-1]
    engine.scheduler.preemption.preempt(running)  # forced: embeddings do not grow, so none is ever preempted
    assert running.num_computed_tokens == 0
    heard = drain(engine, [])
    for name, prompt in prompts.items():
        assert_agrees(heard[name], reference(model, embedder, prompt))


def test_a_text_of_many_windows_agrees(tmp_path: Path) -> None:
    embedder = EMBEDDERS["modernbert, first token"]
    model = write_embedder(tmp_path, embedder)
    engine = load_engine(tmp_path, max_num_batched_tokens=2048)
    prompts = {str(n): random_prompt(n, seed=n) for n in (1100, 3, 600)}
    heard = drain(engine, [embed(name, prompt, embedder) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert_agrees(heard[name], reference(model, embedder, prompt))


def test_an_encoders_text_is_never_cut_even_beyond_the_budget(tmp_path: Path) -> None:
    embedder = EMBEDDERS["bert, mean, of any length"]
    model = write_embedder(tmp_path, embedder)
    engine = load_engine(tmp_path, max_num_batched_tokens=16)
    prompts = {str(n): random_prompt(n, seed=n) for n in (3, 50, 9, 8)}
    heard = drain(engine, [embed(name, prompt, embedder) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert_agrees(heard[name], reference(model, embedder, prompt))


def test_another_pooling_than_the_checkpoints_can_be_asked_for(tmp_path: Path) -> None:
    embedder = EMBEDDERS["bert, first token"]
    model = write_embedder(tmp_path, embedder)
    prompt = random_prompt(20, seed=6)
    heard = one(load_engine(tmp_path), submit("a", prompt, pooling="mean"))
    assert_agrees(heard, reference(model, embedder._replace(pooling="mean"), prompt))


def test_bf16_follows_fp32(tmp_path: Path) -> None:
    for name in ("qwen3, last token", "bert, first token"):
        embedder = EMBEDDERS[name]
        model = write_embedder(tmp_path / name, embedder)
        prompt = random_prompt(40, seed=5)
        heard = one(load_engine(tmp_path / name, dtype="bfloat16"), embed("a", prompt, embedder))
        assert heard.embedding is not None
        assert torch.dot(torch.tensor(heard.embedding), reference(model, embedder, prompt)) > 0.99


def test_each_kind_of_model_refuses_the_others_work_by_name(tmp_path: Path) -> None:
    write_llama(tmp_path / "chat")
    write_embedder(tmp_path / "embedder", EMBEDDERS["qwen3, last token"])
    refused = one(load_engine(tmp_path / "chat"), submit("a", [5, 6], pooling="mean"))
    assert refused.error == "tiny is a model that generates text; it makes no embeddings or scores"
    refused = one(load_engine(tmp_path / "embedder"), submit("a", [5, 6]))
    assert refused.error == "tiny is an embedding model; it cannot generate text"


def test_a_text_may_fill_the_context_and_not_exceed_it(tmp_path: Path) -> None:
    embedder = EMBEDDERS["bert, first token"]
    write_embedder(tmp_path, embedder)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 30}))
    engine = load_engine(tmp_path)
    assert one(engine, embed("a", random_prompt(30, seed=1), embedder)).error is None
    assert (
        one(engine, embed("b", random_prompt(31, seed=1), embedder)).error
        == "the text has 31 tokens; tiny takes at most 30"
    )
    most = json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"]
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most + 1}))
    refused = one(load_engine(tmp_path), embed("c", random_prompt(most + 1, seed=1), embedder))
    assert refused.error == f"the text has {most + 1} tokens; tiny takes at most {most}", (
        "the model has no further positions"
    )


def test_an_aborted_text_leaves_nothing(tmp_path: Path) -> None:
    embedder = EMBEDDERS["llama, mean, of any length"]
    write_embedder(tmp_path, embedder)
    engine = load_engine(tmp_path, max_num_batched_tokens=16)
    engine.submit(embed("a", random_prompt(60, seed=1), embedder))
    engine.step()
    assert engine.scheduler.pool.num_held > 0
    engine.sequences.abort("a")
    assert drain(engine, [])["a"].finish_reason == "abort"


def test_hidden_states_that_are_no_numbers_fail_that_text_alone(tmp_path: Path) -> None:
    embedder = EMBEDDERS["qwen3, last token"]
    model = write_embedder(tmp_path, embedder)
    engine = load_engine(tmp_path)
    weight = engine.runner.model.embedding.weight.values  # type: ignore[attr-defined]
    with torch.inference_mode():
        weight[7] = math.nan
    heard = drain(engine, [embed("a", [5, 7, 9], embedder), embed("b", [5, 6, 9], embedder)])
    assert "not finite" in (heard["a"].error or "")
    assert_agrees(heard["b"], reference(model, embedder, [5, 6, 9]))


def test_what_is_not_computed_is_refused_by_name(tmp_path: Path) -> None:
    write_embedder(tmp_path, EMBEDDERS["qwen3, last token"])
    pooling = tmp_path / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(
        CheckpointError, match=r"asks for the pooling max_tokens; supported is one of mean, cls and lasttoken"
    ):
        load_engine(tmp_path)
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}))
    with pytest.raises(CheckpointError, match="cls_token and mean_tokens"):
        load_engine(tmp_path)
    pooling.write_text(json.dumps({"pooling_mode": "mean"}))
    assert load_engine(tmp_path).info.pooling == "mean"
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.LayerNorm"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=r"lists Transformer, Pooling, LayerNorm; supported are"):
        load_engine(tmp_path)
    (tmp_path / "modules.json").write_text('["Transformer", "Pooling"]')
    with pytest.raises(CheckpointError, match="is not a list of modules"):
        load_engine(tmp_path)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(CheckpointError, match=r"Qwen3Model, which has no output head.*1_Pooling/config.json"):
        load_engine(tmp_path)
    write_recipe(tmp_path, "last", is_normalized=False)
    assert load_engine(tmp_path).info.pooling == "last"


def test_the_prompt_of_a_recipe_is_read_or_refused_by_name(tmp_path: Path) -> None:
    write_embedder(tmp_path, EMBEDDERS["qwen3, last token"])
    assert load_engine(tmp_path).info.text_prompt == ""
    file = tmp_path / "config_sentence_transformers.json"
    for written, prompt in (
        ({"prompts": {"query": "query: "}}, ""),
        ({"prompts": {"query": "query: "}, "default_prompt_name": None}, ""),
        ({"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}, "query: "),
        ({"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "document"}, ""),
    ):
        file.write_text(json.dumps(written))
        assert load_engine(tmp_path).info.text_prompt == prompt
    for wrong in ({"default_prompt_name": "query"}, {"prompts": {"query": 1}, "default_prompt_name": "query"}):
        file.write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match="has default_prompt_name 'query', but no prompt of this name"):
            load_engine(tmp_path)


def test_a_prompt_that_is_not_to_be_pooled_is_refused_by_name(tmp_path: Path) -> None:
    write_embedder(tmp_path, EMBEDDERS["qwen3, last token"])
    write_recipe(tmp_path, "last", is_normalized=True, include_prompt=False)
    assert load_engine(tmp_path).info.text_prompt == ""  # without a prompt include_prompt has no effect
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with pytest.raises(CheckpointError, match="excludes the prompt 'query: ' from the pooling"):
        load_engine(tmp_path)


def test_lengths_are_read_from_the_file_of_any_version(tmp_path: Path) -> None:
    write_embedder(tmp_path, EMBEDDERS["bert, mean, of any length"])
    (tmp_path / "sentence_roberta_config.json").write_text('{"max_seq_length": 7}')
    assert load_engine(tmp_path).info.context_length == 7


def test_an_architecture_that_generates_is_not_taken_for_one_without_a_head(tmp_path: Path) -> None:
    assert read_recipe(tmp_path, {"architectures": ["GPT2LMHeadModel"]}) is None
    with pytest.raises(CheckpointError, match="which has no output head"):
        read_recipe(tmp_path, {"architectures": ["GPT2Model"]})
