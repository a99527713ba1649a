"""A plan predicts the memory of a load exactly: weights, rotary tables and blocks of every family. It also matches published memory figures."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotlight.engine.adapters.peft import projection_key
from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.api.struct import replace
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.planning.devices import GIB, GPUS, cpu, parse_devices
from pilotlight.engine.planning.memory_plan import (
    StepLimits,
    activations_bytes,
    beside_kv,
    block_layout,
    left_for_kv,
    planned_kv_bytes,
    rank_memory,
    weights_limit,
    weights_room,
)
from pilotlight.engine.planning.model_plan import plan_model, planned_weights_bytes, read_model
from pilotlight.engine.planning.parallelism import Parallelism, RankPlace, balanced_stages
from pilotlight.engine.planning.planner import ModelPlan, Workload, described, make_plan
from pilotlight.engine.weights.shard import Shard
from pilotlight.kernels.cpu import library
from tests.engine.driver import runner_of
from tests.engine.families import FURTHER, MODELS, NUM_STAGES, SWEPT, write_family
from tests.engine.stored_weights import write_tensors
from tests.models_page import GEMMA4

CONFIGS = Path(__file__).parent / "configs"
ALONE = RankPlace(Parallelism())


def memory() -> KvMemory:
    return make_kv_memory(HostConfig(device="cpu", kv_bytes=32 << 20))


@pytest.mark.parametrize("name", [*MODELS, *FURTHER])
def test_the_planned_bytes_are_those_of_a_load(tmp_path: Path, name: str) -> None:
    if "mxfp4" in name and not library.takes_codes():
        pytest.skip("plans are made for CPUs that multiply codes as they are")
    write_family(tmp_path, name)
    loaded = load_model(ModelSpec("m", str(tmp_path)), HostConfig(device="cpu", kv_bytes=32 << 20), memory())
    try:
        model = read_model(tmp_path, on_cpu=True)
        rank = rank_memory(model, ALONE, cpu(), loaded.engine.info.context_length, StepLimits())
        assert model.dtype == loaded.engine.info.dtype
        assert rank.weights_bytes == loaded.engine.info.weights_bytes
        decoder: Any = runner_of(loaded.engine).model
        tables = [part for table in decoder.rotary for part in (table.cos, table.sin)]
        assert rank.tables_bytes == sum(table.nbytes for table in tables)
        assert model.adapted_shapes() == {
            projection_key(part.name): (part.rows.total, part.columns.total) for part in decoder.projections
        }
        layout = block_layout(model, ALONE, 16, model.config.context_length)
        assert layout is not None
        assert layout.block_bytes == runner_of(loaded.engine).layout.block_bytes
        assert planned_weights_bytes(tmp_path, "auto", on_cpu=True) == pytest.approx(rank.weights_bytes, rel=0.03)
    finally:
        loaded.close()


@pytest.mark.process
def test_a_plan_needs_no_torch() -> None:
    pytest.importorskip("orjson")  # the command line needs it
    names = (
        "pilotlight.engine.planning.planner, pilotlight.engine.planning.model_plan, pilotlight.runtime.cli.models.plan"
    )
    script = f"import sys, {names}\nassert 'torch' not in sys.modules and 'kernels' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("stored", "dtype", "on_cpu", "item"),
    [
        (torch.float32, "auto", True, 4),
        (torch.bfloat16, "auto", True, 4),  # a CPU computes small models in fp32
        (torch.bfloat16, "auto", False, 2),
        (torch.bfloat16, "bfloat16", True, 2),
        (torch.bfloat16, "float32", False, 4),
    ],
)
def test_without_a_config_the_files_say_the_size(
    tmp_path: Path, stored: torch.dtype, dtype: str, on_cpu: bool, item: int
) -> None:
    write_tensors(tmp_path, {"weight": torch.zeros(1000, dtype=stored)})
    assert planned_weights_bytes(tmp_path, dtype, on_cpu=on_cpu) == 1000 * item


def test_a_directory_without_weights_has_no_size(tmp_path: Path) -> None:
    assert planned_weights_bytes(tmp_path, "auto", on_cpu=True) == 0
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert planned_weights_bytes(tmp_path, "auto", on_cpu=True) == 0


@pytest.mark.parametrize("name", [*(name for name in MODELS if "mxfp4" not in name), *SWEPT])
def test_ranks_have_all_of_a_models_numbers_together(tmp_path: Path, name: str) -> None:
    write_family(tmp_path, name)
    model = read_model(tmp_path)
    whole = model.weight_bytes(ALONE, on_cpu=False)
    for parallelism in (Parallelism(pp=2), Parallelism(pp=3)):
        if parallelism.pp > NUM_STAGES.get(name, 3):
            with pytest.raises(CheckpointError, match="pipeline stage"):
                model.stages(parallelism.pp)
            continue
        parts = [model.weight_bytes(RankPlace(parallelism, 0, stage), on_cpu=False) for stage in range(parallelism.pp)]
        for part, size in whole.items():
            assert sum(one.get(part, 0) for one in parts) == size


# Published figure: more than 56 GiB, or 1.2 million tokens, are left for the KV cache.
def test_scout_leaves_the_published_room_on_two_h200() -> None:
    model = read_model(CONFIGS / "llama-4-scout.json")
    plan = make_plan(model, parse_devices("2xh200", never), Workload.of(model, 1 << 20))
    assert plan.best.parallelism == Parallelism(tp=2)
    assert plan.best.kv_bytes > 56 * GIB
    assert plan.best.kv_tokens >= 1_200_000
    assert sum(shape.numbers for _, shape in model.weights()) == pytest.approx(109e9, rel=0.01)


GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 256,
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
    },
}  # fmt: skip


def test_a_plan_has_the_tower_of_gemma_3_and_an_image_beyond_the_limit_of_a_step() -> None:
    model, text = plan_model(GEMMA_3_4B), plan_model({**GEMMA_3_4B, "vision_config": None})
    in_tower = sum(shape.numbers for _, shape in model.weights() if shape.part == "vision")
    assert in_tower == 416_866_032 + 2_950_272  # published sizes of the tower and of the projector
    assert sum(shape.numbers for _, shape in model.weights()) == pytest.approx(4.3e9, rel=0.01)
    larger = StepLimits(max_num_batched_tokens=StepLimits().max_num_batched_tokens + 256)
    step = activations_bytes(text, ALONE, larger)
    assert activations_bytes(model, ALONE, StepLimits()) == model.config.image_needs(model.item_bytes).kept + step


# Published figure: more than 30 GiB are left for the KV cache.
def test_kimi_in_int4_leaves_the_published_room_on_eight_h100() -> None:
    model = read_model(CONFIGS / "kimi-k2.5-int4.json")
    plan = make_plan(model, parse_devices("8xh100", never), Workload.of(model), Parallelism(tp=8))
    assert plan.best.fits
    assert plan.best.kv_bytes > 30 * GIB
    assert sum(shape.numbers for _, shape in model.weights()) == pytest.approx(1.0e12, rel=0.03)


@pytest.fixture(scope="module")
def plan_of_sixteen() -> ModelPlan:
    model = read_model(CONFIGS / "kimi-k2.5-int4.json")
    return make_plan(model, parse_devices("16xh100", never), Workload.of(model))


@pytest.mark.long
def test_a_plan_weighs_copies_of_the_attention_on_several_ranks_too(plan_of_sixteen: ModelPlan) -> None:
    fitting = [split for split in plan_of_sixteen.splits if split.fits]
    assert any(split.parallelism.copies > 1 and split.parallelism.tp > 1 for split in fitting)
    paces = [split.speed.tokens_per_s for split in fitting if split.speed is not None]
    assert paces == sorted(paces, reverse=True)


@pytest.mark.long
def test_ranks_with_sequences_of_their_own_hold_so_many_times_the_tokens(plan_of_sixteen: ModelPlan) -> None:
    plan = plan_of_sixteen
    by_split = {split.parallelism: split for split in plan.splits}
    whole, cut = by_split[Parallelism(ep=16)], by_split[Parallelism(tp=16, ep=16)]
    of_rank = min(rank.kv_tokens(whole.workload.context_length, 2048) for rank in whole.ranks)
    assert whole.kv_tokens == 16 * of_rank
    assert whole.kv_tokens > 7 * cut.kv_tokens, (
        "with tp=16 every rank keeps all latent vectors, which have no heads to divide"
    )


def test_deepseek_has_the_published_number_of_parameters() -> None:
    model = read_model(CONFIGS / "deepseek-r1.json")
    assert sum(shape.numbers for _, shape in model.weights()) == pytest.approx(671e9, rel=0.001)


# Published billions of parameters: without the table of layers' inputs, or of the model with experts all.
GEMMA4_BILLIONS = {"E2B": 2.3, "E4B": 4.5, "26B-A4B": 25.2}


def gemma4(name: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": ["Gemma4ForCausalLM"], **GEMMA4[name], **changes}


@pytest.mark.parametrize("name", GEMMA4)
def test_gemma_4_has_the_published_number_of_parameters(name: str) -> None:
    model = plan_model(gemma4(name))
    effective = sum(shape.numbers for _, shape in model.weights() if shape.part != "layer_inputs")
    assert effective == pytest.approx(GEMMA4_BILLIONS[name] * 1e9, rel=0.04)


def test_layers_that_read_earlier_keys_take_no_room_in_blocks() -> None:
    config, without = gemma4("E2B"), gemma4("E2B", num_kv_shared_layers=0)
    few, all_layers = (plan_model(each).cached_layers(ALONE) for each in (config, without))
    assert [bool(layer.segments) for layer in few] == [True] * 15 + [False] * 20
    assert few[:15] == all_layers[:15]
    assert all(layer.segments for layer in all_layers)
    # Of a context shorter than the window, 28 layers read 15 * 4 / 5 vectors of 256 numbers, and 7 read 3 of 512.
    assert plan_model(config).config.read_share(100) == pytest.approx((28 + 2 * 7) / (12 + 2 * 3))
    assert plan_model(without).config.read_share(100) == 1.0


def test_the_inputs_of_layers_count_in_a_step_and_in_the_weights_of_each_rank() -> None:
    model, plain = plan_model(gemma4("E2B")), plan_model(gemma4("E2B", hidden_size_per_layer_input=0))
    limits = StepLimits(max_num_batched_tokens=100, max_num_seqs=1)
    added = activations_bytes(model, ALONE, limits) - activations_bytes(plain, ALONE, limits)
    assert added >= 3 * 100 * 35 * 256 * 2
    table = 262_144 * 35 * 256 * 2
    assert model.weight_bytes(ALONE, on_cpu=False)["layer_inputs"] == table
    parts = [model.weight_bytes(RankPlace(Parallelism(tp=2), rank), on_cpu=False)["layer_inputs"] for rank in range(2)]
    assert parts == [table // 2] * 2
    with pytest.raises(CheckpointError, match="only the first pipeline stage has: use one stage"):
        make_plan(model, parse_devices("2xh100", never), Workload.of(model), Parallelism(pp=2))


def test_a_split_that_does_not_divide_names_those_that_would() -> None:
    model = read_model(CONFIGS / "llama-4-scout.json")
    devices, workload = parse_devices("8xh200", never), Workload.of(model)
    with pytest.raises(
        CheckpointError, match=r"tp is 3, and the model has 40 heads and 8 key-value heads; tp may be 1, 2, 4, 8, 40"
    ):
        make_plan(model, devices, workload, Parallelism(tp=3))
    with pytest.raises(CheckpointError, match=r"ep is 3, and the model has 16 experts; ep may be 2, 4, 8, 16"):
        make_plan(model, devices, workload, Parallelism(ep=3))
    with pytest.raises(CheckpointError, match=r"pp is 49, but the model has 48 layers"):
        make_plan(model, parse_devices("49xh200", never), workload, Parallelism(pp=49))
    with pytest.raises(CheckpointError, match=r"tp 8, pp 2, ep 1 needs 16 devices; 8xh200 are given"):
        make_plan(model, devices, workload, Parallelism(tp=8, pp=2))
    with pytest.raises(CheckpointError, match=r"the context is 99999999 tokens; the model takes from 2 to 10485760"):
        Workload.of(model, 99_999_999)
    with pytest.raises(CheckpointError, match=r"'9xtpu' names no devices; use NUMBERxKIND such as 8xh100"):
        parse_devices("9xtpu", never)


def test_what_cuts_a_group_under_one_scale_is_refused() -> None:
    config = read_config_of("kimi-k2.5-int4") | {"moe_intermediate_size": 96}
    model = plan_model(config)
    with pytest.raises(
        CheckpointError, match=r"96 columns in groups of 32 under one scale, but a rank would have 48; .* 1, 3"
    ):
        make_plan(model, parse_devices("2xh100", never), Workload.of(model), Parallelism(tp=2))


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    model = read_model(CONFIGS / "kimi-k2.5-int4.json")
    told = described(make_plan(model, parse_devices("4xh100", never), Workload.of(model)))
    assert not any(split["fits"] for split in told["splits"])
    assert "does not fit: a rank lacks" in told["splits"][0]["reason"]
    assert all(rank["kv_bytes"] < 0 for rank in told["splits"][0]["ranks"][-1:])


def test_totals_are_the_sums_of_the_ranks_and_ranks_those_of_their_parts() -> None:
    model = read_model(CONFIGS / "llama-4-scout.json")
    told = described(make_plan(model, parse_devices("8xh200", never), Workload.of(model)), price_per_hour=3.0)
    for split in told["splits"]:
        ranks = split["ranks"]
        assert split["total_weights_bytes"] == sum(rank["weights_bytes"] for rank in ranks)
        assert split["total_kv_bytes"] == sum(rank["kv_bytes"] for rank in ranks)
        for rank in ranks:
            parts = [size for key, size in rank.items() if key.endswith("_weights_bytes")]
            assert rank["weights_bytes"] == sum(parts)
            taken = [rank[f"{key}_bytes"] for key in ("weights", "tables", "activations", "reserved", "kv")]
            assert sum(taken) == rank["device_bytes"]
        hours = split["cost_per_million_tokens"] / (3.0 * 8) * 3600
        assert hours * split["speed"]["tokens_per_s"] == pytest.approx(1e6)


def test_stages_are_as_even_as_layers_allow() -> None:
    costs = (1.0,) * 3 + (5.0,) * 9  # three dense layers before nine with experts
    stages = balanced_stages(costs, 4.0, 3)
    assert [stage.start for stage in stages] == [0, *[stage.stop for stage in stages[:-1]]]
    times = [sum(costs[i] for i in stage) for stage in stages]
    times[0] += 4.0
    assert max(times) - min(times) <= 5.0
    assert max(times) <= 20.0, "whole layers"


def test_layers_of_experts_weigh_what_a_step_of_decodes_reads_of_them() -> None:
    model = plan_model({
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 768, "num_hidden_layers": 16, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048, "moe_intermediate_size": 384, "num_experts": 16,
        "num_experts_per_tok": 4, "mlp_only_layers": [*range(8)], "vocab_size": 32_000, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    })  # fmt: skip
    assert [len(layers) for layers in model.stages(2)] == [10, 6], "a step of one token would give 5 and 11 layers"
    assert model._replace(dtype="float32").stages(2) == model.stages(2)


def test_the_device_leaves_to_the_cache_what_nothing_else_takes() -> None:
    total = GPUS["h100"].memory_bytes
    left = left_for_kv(total, 16 * GIB, GIB)
    assert 55 * GIB < left < 62 * GIB
    assert left_for_kv(total, 90 * GIB, GIB) == 0
    assert left_for_kv(total, 16 * GIB, GIB, has_standby=False) > left


def test_a_rank_keeps_its_heads_and_at_least_one() -> None:
    model = read_model(CONFIGS / "llama-4-scout.json")
    (layer, *_) = model.config.cached_layers
    assert [segment.num_heads for segment in layer.part_of(Shard(0, 4)).segments] == [2, 2]
    assert [segment.num_heads for segment in layer.part_of(Shard(3, 16)).segments] == [1, 1]


def read_config_of(name: str) -> dict[str, object]:
    import json

    return dict(json.loads((CONFIGS / f"{name}.json").read_text()))


def never() -> object:
    raise AssertionError("this machine was asked about")


def test_a_cache_without_a_size_is_what_models_leave_of_a_gpu() -> None:
    directory, total = CONFIGS / "llama-4-scout.json", GPUS["h200"].memory_bytes
    host = HostConfig(device="cuda:0", group=("cuda:0", "cuda:1"), model_bytes=(100 * GIB,))
    kv_bytes = planned_kv_bytes(directory, "auto", host, total)
    model = read_model(directory)
    rank = rank_memory(model, RankPlace(Parallelism(2)), GPUS["h200"], model.config.context_length, StepLimits())
    assert kv_bytes == rank.kv_bytes > 0, "must equal the planned bytes"
    assert weights_limit(host, total) == 100 * GIB
    assert planned_kv_bytes(directory, "auto", replace(host, model_bytes=(200 * GIB,)), total) == 0, (
        "models that do not fit leave nothing"
    )


def test_models_that_take_turns_leave_half_a_gpu_to_the_cache() -> None:
    assert weights_room([10, 20, 30], 1000) == 60
    assert weights_room([400, 300, 300], 1000) == 500
    assert weights_room([700, 300], 1000) == 700, "the largest model has to fit"
    assert weights_room([0, 300], 1000) == 500, "one model is not downloaded yet"
    assert weights_limit(HostConfig(kv_bytes=20 * GIB), 80 * GIB) == beside_kv(80 * GIB, 20 * GIB) < 60 * GIB
