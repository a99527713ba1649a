"""Drafters with weights: their results, their state in the blocks of the model, and errors when they are loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.drafting.drafter_registry import DraftWords
from pilotlight.engine.drafting.speculator import Speculator
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.loading.draft_loading import plan_drafts
from pilotlight.engine.models.model_registry import find_family
from pilotlight.engine.planning.parallelism import Parallelism
from tests.checkpoints import write_llama
from tests.engine.driver import drain, drain_preempting, load_engine, one, random_prompt, runner_of, submit
from tests.engine.families import write_family
from training.ember.chat import HERE, Chat
from training.ember.network import load, rotate

MINI, EAGLE3 = HERE / "mini", HERE / "eagle3"
MTP_FAMILIES = (
    "deepseek-v3, three experts in two of four groups, yarn",
    "glm-4.5, half of each head turns, normed and biased",
    "glm-5, 17 keys, layer 1 shares",
)
LAYERS = 3


def write_mtp(directory: Path, family: str) -> None:
    """Write a checkpoint with a prediction layer after the layers that config.json counts, as in DeepSeek's: a copy of the last layer, and the
    tensors that join its inputs."""
    write_family(directory, family)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tensors, hidden = load_file(directory / "model.safetensors"), config["hidden_size"]
    last, further = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    own = {
        further + name.removeprefix(last): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)
    }
    for part in ("enorm", "hnorm", "shared_head.norm"):
        own[f"{further}{part}.weight"] = tensors["model.norm.weight"].clone()
    # The layer ignores the token and uses only the state of the model, so some of its guesses are right.
    own[f"{further}eh_proj.weight"] = torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden)), 1)
    own[f"{further}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    own[f"{further}shared_head.head.weight"] = tensors.get(
        "lm_head.weight", tensors["model.embed_tokens.weight"]
    ).clone()
    save_file({**tensors, **own}, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_a_checkpoint_s_further_layer_drafts_and_changes_no_token(tmp_path: Path, family: str, depth: int) -> None:
    write_mtp(tmp_path, family)
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {"frequency_penalty": 0.5}, {"num_logprobs": 2}]
    requests = [submit(f"{i}", random_prompt(5 + 9 * i, seed=i), max_tokens=20, **kind) for i, kind in enumerate(kinds)]
    plain = drain(load_engine(tmp_path, kv_tokens=2048), requests)
    engine = load_engine(tmp_path, kv_tokens=2048, speculate="mtp", depth=depth, max_num_batched_tokens=24)
    found = drain_preempting(engine, requests)
    assert {name: heard.token_ids for name, heard in found.items()} == {
        n: heard.token_ids for n, heard in plain.items()
    }
    counts = engine.load().drafts
    assert counts.num_draft_tokens > 5
    assert counts.num_failures == 0
    engine.close()


def accepted_share(engine: Engine) -> float:
    counts = engine.load().drafts
    assert counts.num_failures == 0
    return counts.num_accepted_tokens / counts.num_draft_tokens


def test_a_model_that_drafts_for_itself_is_right_wherever_it_may_choose(tmp_path: Path) -> None:
    write_llama(tmp_path)
    for sampling in ({}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.3}):
        engine = load_engine(tmp_path, kv_tokens=512, speculate=f"draft:{tmp_path}")
        heard = one(engine, submit("a", random_prompt(20, seed=1), max_tokens=30, **sampling))
        assert (
            heard.token_ids
            == one(load_engine(tmp_path), submit("a", random_prompt(20, seed=1), max_tokens=30, **sampling)).token_ids
        )
        assert accepted_share(engine) == 1.0
        engine.close()


def test_a_draft_model_may_have_other_windows_and_heads_than_the_model(tmp_path: Path) -> None:
    write_family(tmp_path / "model", "gemma3, windows but in layer 2, tied")
    write_llama(tmp_path / "draft", num_hidden_layers=1, tie_word_embeddings=True)
    requests = [submit(f"{i}", random_prompt(30 + i, seed=i), max_tokens=20) for i in range(3)]
    plain = drain(load_engine(tmp_path / "model", kv_tokens=1024), requests)
    engine = load_engine(tmp_path / "model", kv_tokens=1024, speculate=f"draft:{tmp_path / 'draft'}")
    found = drain_preempting(engine, requests)
    assert {name: heard.token_ids for name, heard in found.items()} == {
        n: heard.token_ids for n, heard in plain.items()
    }
    assert engine.load().drafts.num_draft_tokens > 5
    engine.close()


def test_a_draft_model_may_read_keys_of_earlier_layers(tmp_path: Path) -> None:
    write_family(tmp_path, "gemma4, inputs of layers, layers 4 to 6 read keys of 2 and 3, twice as wide, capped")
    request = submit("a", random_prompt(30, seed=1), max_tokens=30)
    engine = load_engine(tmp_path, speculate=f"draft:{tmp_path}")
    assert one(engine, request).token_ids == one(load_engine(tmp_path), request).token_ids
    assert accepted_share(engine) == 1.0, "the model drafts for itself"
    engine.close()


def test_a_head_guesses_what_its_published_arithmetic_says() -> None:
    """Guesses are compared with a reference in plain torch over whole sequences. The first guess follows the model's hidden states, later guesses
    those of the head."""
    prompt, num_guesses = random_prompt(21, seed=2, vocab=2000), 4
    engine = load_engine(HERE, dtype="float32", kv_tokens=512, speculate=f"eagle3:{EAGLE3}")
    asked: list[list[int]] = []
    speculation = engine.speculation
    assert isinstance(speculation, Speculator)
    assert speculation.model is not None
    propose = speculation.model.propose

    def noting(sequences: Any, length: int) -> list[list[int]]:
        guessed = propose(sequences, num_guesses)
        asked.append([*sequences[0].token_ids, *guessed[0]])
        return [tokens[:length] for tokens in guessed]

    speculation.model.propose = noting
    one(engine, submit("a", prompt, max_tokens=12))
    engine.close()
    for tokens in asked[:3]:
        known = len(tokens) - num_guesses
        assert reference_guesses(tokens[:known], num_guesses) == tokens[known:]


def reference_guesses(token_ids: list[int], num: int) -> list[int]:
    network, weights = (
        load(HERE),
        {name: tensor.float() for name, tensor in load_file(EAGLE3 / "model.safetensors").items()},
    )
    config = json.loads((EAGLE3 / "config.json").read_text())
    entered = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weights[name]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T

    with torch.inference_mode():
        x = network.embed_tokens(torch.tensor([token_ids[:-1]]))
        taps = []
        for i, layer in enumerate(network.layers, 1):
            x = layer(x, network.cos[: x.shape[1]], network.sin[: x.shape[1]])
            if i in entered:
                taps.append(x)
        features = linear(torch.cat(taps, -1)[0], "fc")  # the features of all tokens except the newest
        tokens = list(token_ids)
        for _ in range(num):
            before = torch.cat(
                (torch.zeros(1, features.shape[1]), features)
            )  # for each token the features of the previous token
            embedded, length = network.embed_tokens(torch.tensor(tokens)), len(tokens)
            x = torch.cat(
                (norm(embedded, "midlayer.input_layernorm.weight"), norm(before, "midlayer.hidden_norm.weight")), -1
            )
            q, k, v = (
                linear(x, f"midlayer.self_attn.{part}_proj").view(length, -1, dim).transpose(0, 1) for part in "qkv"
            )
            q, k = (
                rotate(q, network.cos[:length], network.sin[:length]),
                rotate(k, network.cos[:length], network.sin[:length]),
            )
            k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = before + linear(mixed.transpose(0, 1).flatten(1), "midlayer.self_attn.o_proj")
            y = norm(x, "midlayer.post_attention_layernorm.weight")
            gate = torch.nn.functional.silu(linear(y, "midlayer.mlp.gate_proj"))
            hidden = x + linear(gate * linear(y, "midlayer.mlp.up_proj"), "midlayer.mlp.down_proj")
            best = int(linear(norm(hidden[-1], "norm.weight"), "lm_head").argmax())
            tokens.append(best + int(weights["d2t"][best]))
            features = torch.cat((features, hidden[-1:]))
    return tokens[-num:]


def test_ember_s_drafters_are_often_right() -> None:
    prompts = [
        Chat().prompt([{"role": "user", "content": text}])
        for text in (
            "What is the airport code of Lisbon?",
            "Tell me a short story about a fox.",
            "Where does Anna live? Anna lives in Oslo.",
        )
    ]
    for words, least in ((f"draft:{MINI}", 0.2), (f"eagle3:{EAGLE3}", 0.2)):
        engine = load_engine(HERE, dtype="float32", kv_tokens=2048, speculate=words)
        drain(engine, [submit(f"{i}", prompt, max_tokens=40, ignore_eos=False) for i, prompt in enumerate(prompts)])
        counts = engine.load().drafts
        assert counts.accepted_per_position[0] / counts.num_drafts > least, words
        engine.close()


def test_a_model_s_blocks_hold_what_its_drafter_knows() -> None:
    plain, drafting = (load_engine(HERE, dtype="float32", speculate=words) for words in ("off", f"draft:{MINI}"))
    assert isinstance(plain.runner, ModelRunner)
    assert isinstance(drafting.runner, ModelRunner)
    added = runner_of(drafting).layout.block_bytes - runner_of(plain).layout.block_bytes
    assert added == 2 * 2 * 16 * 64 * 4, "two layers of keys and values, 16 tokens, one head of 64, in fp32"
    assert drafting.info.weights_bytes > plain.info.weights_bytes
    for engine in (plain, drafting):
        engine.close()


def changed(
    directory: Path, source: Path, config: dict[str, Any], tensors: Callable[[dict[str, torch.Tensor]], Any]
) -> Path:
    shutil.copytree(source, directory)
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**described, **config}))
    held = load_file(directory / "model.safetensors")
    tensors(held)
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("words", "config", "why"),
    [
        ("draft", {"vocab_size": 2047}, "vocabulary of 2047 tokens, but the model has 2048"),
        ("draft", {"architectures": ["Unheard"]}, "names architecture Unheard"),
        ("draft", {"hidden_size": 130, "head_dim": 64}, "but config.json makes it"),
        ("eagle3", {"vocab_size": 32000}, "vocabulary of 32000 tokens, and the model one of 2048"),
        ("eagle3", {"target_hidden_size": 4096}, "hidden states of 4096 numbers, and the model's have 256"),
        ("eagle3", {"draft_vocab_size": 321}, "config.json makes it"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}}, "they must be 3 layers, rising"),
        ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}}, "must be layers below 7"),
    ],
)  # fmt: skip
def test_a_drafter_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, words: str, config: dict[str, Any], why: str
) -> None:
    directory = changed(tmp_path / "drafter", MINI if words == "draft" else EAGLE3, config, lambda held: None)
    with pytest.raises(CheckpointError, match=f"the drafter in {directory}: .*{why}"):
        load_engine(HERE, dtype="float32", speculate=f"{words}:{directory}")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda held: held.pop("fc.weight"), "tensor fc.weight is missing"),
        (lambda held: held.pop("d2t"), "it has no d2t"),
        (lambda held: held["d2t"].fill_(0).add_(3000), "names tokens twice, or beyond"),
        (lambda held: held.update(more=torch.zeros(2)), "more"),
    ],
    ids=["no projection", "no table", "tokens beyond", "another tensor"],
)
def test_a_head_without_what_it_promises_is_refused(tmp_path: Path, change: Callable[[Any], Any], why: str) -> None:
    directory = changed(tmp_path / "head", EAGLE3, {}, change)
    with pytest.raises(CheckpointError, match=why):
        load_engine(HERE, dtype="float32", speculate=f"eagle3:{directory}")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("mtp", "config.json names none"),
        ("draft:/nowhere", "/nowhere is not a directory"),
        (f"eagle3:{MINI}", "it is not an EAGLE-3 head"),
    ],
)
def test_a_drafter_that_is_not_there_is_refused(words: str, why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        load_engine(HERE, dtype="float32", speculate=words)


def test_stages_refuse_a_drafter_with_weights() -> None:
    with pytest.raises(CheckpointError, match="draft does not draft for a model in 2 stages; set it to suffix,grammar"):
        plan_drafts(DraftWords.read(f"draft:{MINI}"), None, Parallelism(pp=2), find_family)


def test_ranks_with_sequences_of_their_own_refuse_a_drafter_with_weights() -> None:
    with pytest.raises(CheckpointError, match="mtp does not draft for ranks with separate sequences"):
        plan_drafts(DraftWords.read("mtp"), None, Parallelism(ep=2), find_family)


def test_damaged_weights_of_a_drafter_change_no_token(tmp_path: Path) -> None:
    directory = changed(
        tmp_path / "drafter", MINI, {}, lambda held: held["model.layers.1.mlp.down_proj.weight"].fill_(3e38)
    )
    engine = load_engine(HERE, dtype="float32", speculate=f"draft:{directory}")
    prompt = random_prompt(12, seed=3, vocab=2000)
    heard, plain = (
        one(engine, submit("a", prompt, max_tokens=12)),
        one(load_engine(HERE, dtype="float32"), submit("a", prompt, max_tokens=12)),
    )
    assert heard.token_ids == plain.token_ids
    assert engine.load().drafts.num_failures == 1
    engine.close()
