"""Models with recurrent state beside the KV cache: what a prefix hit saves, the memory of a context, and refusals by name."""

from pathlib import Path

import pytest
from transformers import Qwen3NextConfig

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.kv.pool.groups import CacheGroups
from pilotlight.engine.kv.pool.layout import STATE_WINDOW
from pilotlight.engine.planning.devices import cpu
from pilotlight.engine.planning.memory_plan import StepLimits, all_ranks, block_layout
from pilotlight.engine.planning.model_plan import plan_model, read_model
from pilotlight.engine.planning.parallelism import Parallelism, RankPlace
from tests.adapters import ATTENTION, adapted, write_adapter
from tests.checkpoints import write_checkpoint, write_llama
from tests.engine.agreement import assert_agrees, full
from tests.engine.driver import drain, load_engine, one, random_prompt, submit
from tests.engine.families import FURTHER, write_family

HYBRID = "qwen3-next, attention in layer 1, three of five experts"
# Families with the other kinds of states.
MIXERS = (
    "lfm2, attention in layer 1",
    "granite-4, attention in layer 1",
    "falcon-h1, scaled at each seam",
    "kimi-linear, attention in layer 1, three of eight experts",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid")
    write_family(path, HYBRID)
    return path


def published() -> dict[str, object]:
    config: dict[str, object] = Qwen3NextConfig().to_dict()
    return {**config, "architectures": ["Qwen3NextForCausalLM"], "max_position_embeddings": 1 << 17}


@pytest.mark.long
def test_a_prompt_that_shares_its_beginning_computes_the_rest_and_less_than_a_snapshots_interval(
    tmp_path: Path,
) -> None:
    config = FURTHER[HYBRID].__class__(**{**FURTHER[HYBRID].to_dict(), "max_position_embeddings": 9000})
    write_checkpoint(tmp_path, config)
    engine = load_engine(tmp_path, dtype="float32", kv_tokens=30_000, block_size=64)
    shared = random_prompt(6000, seed=1)
    one(engine, submit("a", shared + random_prompt(2000, seed=2), max_tokens=1))
    before = engine.load().prompt_tokens
    one(engine, submit("b", shared + random_prompt(2000, seed=3), max_tokens=1))
    interval = engine.info.block_size
    assert 2000 <= engine.load().prompt_tokens - before < 2000 + interval


def granite() -> dict[str, object]:
    """Return the published config of Granite 4.0 H Small."""
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2,
        "num_local_experts": 72, "num_experts_per_tok": 10, "intermediate_size": 768, "shared_intermediate_size": 1536, "vocab_size": 100352,
        "max_position_embeddings": 1 << 17, "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    }  # fmt: skip


def cache_share(config: dict[str, object], attention: str) -> float:
    """Return the cache bytes of 65,536 tokens as a share of those with keys and values in all layers."""

    def context_bytes(**changes: object) -> int:
        layout = block_layout(plan_model({**config, **changes}), RankPlace(Parallelism()), 16, 1 << 17)
        assert layout is not None
        groups = CacheGroups(layout.block_size, 2048, layout.windows)
        return groups.most_blocks(1 << 16, 1) * layout.block_bytes

    layers = config["num_hidden_layers"]
    assert isinstance(layers, int)
    return context_bytes() / context_bytes(layer_types=[attention] * layers)


def test_a_long_context_takes_little_more_than_the_layers_that_attend() -> None:
    assert cache_share(published(), "full_attention") < 0.3, (
        "a quarter of the layers has keys and values, which alone is 0.25"
    )
    assert cache_share(granite(), "attention") < 0.15, "a tenth of the layers has keys and values, which alone is 0.1"


def test_blocks_of_a_published_model_are_a_thousand_tokens_long() -> None:
    layout = block_layout(plan_model(published()), RankPlace(Parallelism()), 16, 1 << 17)
    assert layout is not None
    assert layout.block_size == 1024
    assert {None, STATE_WINDOW} == set(layout.windows)


@pytest.mark.parametrize("family", [HYBRID, *MIXERS])
def test_a_plan_has_the_blocks_of_the_arena(tmp_path: Path, family: str) -> None:
    write_family(tmp_path, family)
    engine = load_engine(tmp_path, dtype="float32")
    info, windows = engine.info, engine.scheduler.limits.windows
    layout = block_layout(read_model(tmp_path, "float32"), RankPlace(Parallelism()), 16, info.context_length)
    assert layout is not None
    assert (layout.block_bytes, layout.block_size, layout.windows) == (info.kv_block_bytes, info.block_size, windows)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", [HYBRID, *MIXERS])
def test_rejected_drafts_leave_no_trace_in_a_state(tmp_path: Path, family: str, depth: int) -> None:
    model, prompt = write_family(tmp_path, family), random_prompt(37, seed=1)
    engine = load_engine(tmp_path, dtype="float32", speculate="suffix", depth=depth)
    # The second answer is drafted from the first one, and so is the third one, which may not have one of its tokens.
    first, again = (one(engine, full(name, prompt, max_tokens=40)) for name in "ab")
    turn = full("c", prompt, max_tokens=40, logit_bias=((first.token_ids[20], -100.0),))
    turned, alone = one(engine, turn), one(load_engine(tmp_path, dtype="float32"), turn)
    assert first.token_ids == again.token_ids
    assert engine.speculation is not None
    counts = engine.speculation.counts
    assert counts.num_draft_tokens > counts.num_accepted_tokens > 25, "some drafts of the third answer are right"
    assert_agrees(model, prompt, again)
    assert turned.token_ids == alone.token_ids
    for ours, theirs in zip(turned.logprobs, alone.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_drafter_with_weights_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    write_llama(tmp_path)
    with pytest.raises(CheckpointError, match=r"draft drafts only for .* has states; set it to suffix,grammar"):
        load_engine(directory, speculate=f"draft:{tmp_path}")


def test_a_drafter_that_keeps_a_state_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    write_llama(tmp_path)
    with pytest.raises(CheckpointError, match="has a recurrent state, which cannot take back"):
        load_engine(tmp_path, speculate=f"draft:{directory}")


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3.5, attention in layer 2", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")),
        (HYBRID, ("in_proj_qkvz", "in_proj_ba", "out_proj")),
        ("granite-4, attention in layer 1", ("in_proj",)),
        ("lfm2, attention in layer 1", ("conv.in_proj", "conv.out_proj")),
    ],
)
def test_adapters_change_the_projections_of_layers_with_a_state(
    tmp_path: Path, family: str, targets: tuple[str, ...]
) -> None:
    model = write_family(tmp_path / "base", family)
    merged = write_adapter(tmp_path / "a", model, targets=(*targets, *ATTENTION[:3]))
    engine, prompt = load_engine(tmp_path / "base", dtype="float32"), random_prompt(37, seed=1)
    assert_agrees(merged, prompt, one(engine, adapted(full("a", prompt, max_tokens=4), tmp_path / "a")))
    assert_agrees(model, prompt, one(engine, full("b", prompt, max_tokens=2)))


def test_ranks_with_separate_sequences_are_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"2 copies of layers with recurrent states.* set dp to 1"):
        all_ranks(plan_model(published()), Parallelism(ep=2), cpu(), 1 << 17, StepLimits())


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_share_the_weights_and_the_states_of_a_plan(tp: int) -> None:
    model = plan_model(published())
    alone, (shared, *others) = (all_ranks(model, Parallelism(tp=n), cpu(), 1 << 17, StepLimits()) for n in (1, tp))
    assert len(others) == tp - 1
    assert shared.weights_bytes < 1.1 * alone[0].weights_bytes / tp


def test_what_a_failed_step_has_changed_of_a_state_is_computed_anew(tmp_path: Path) -> None:
    model = write_family(tmp_path, HYBRID)
    engine = load_engine(tmp_path, dtype="float32")
    prompt = random_prompt(37, seed=4)
    engine.submit(full("a", prompt, max_tokens=9))
    for _ in range(4):
        engine.step()
    choose = engine.runner.choose

    def fail(*_: object) -> None:
        engine.runner.choose = choose
        raise RuntimeError("the choice failed")

    engine.runner.choose = fail  # fails after the states of the step have been written
    with pytest.raises(RuntimeError, match="the choice failed"):
        engine.step()
    engine.recover("a step failed")
    assert_agrees(model, prompt, drain(engine, [])["a"])
