"""Predictions of `pilotlight plan` for an 8B model on an H100, beside measured and published figures."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from load_tests.records import Record
from pilotlight.engine.planning.devices import DeviceSet, parse_devices
from pilotlight.engine.planning.model_plan import plan_model
from pilotlight.engine.planning.planner import Workload, make_plan

CONTEXT = 512  # tokens before each decode in the record; ShareGPT's conversations have about as many
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


class Published(NamedTuple):
    engine: str
    sequences: int  # concurrent sequences: the engine's default
    tokens_per_s: float
    source: str


PUBLISHED = tuple(
    Published(f"{name}, 1,000 ShareGPT prompts", 256, rate, "research.aimultiple.com/inference-engines")
    for name, rate in (("SGLang", 16_215), ("LMDeploy", 16_132), ("vLLM", 12_553))
)


def predictions(results: Record) -> Iterable[list[str]]:
    """Show one line per batch of the record of an H100, then one per published figure of another project."""
    yield [
        "8B, bf16, one H100: output tokens/s",
        "sequences",
        "predicted",
        "measured",
        "predicted / measured",
        "source",
    ]
    for row in results["decode"]:
        yield _line("this engine", row["batch"], row["served"]["tokens_per_s"], "the record above")
    for one in PUBLISHED:
        yield _line(one.engine, one.sequences, one.tokens_per_s, one.source)


def _line(engine: str, sequences: int, measured: float, source: str) -> list[str]:
    predicted = predicted_tokens_per_s(sequences)
    return [engine, str(sequences), f"{predicted:,.0f}", f"{measured:,.0f}", f"{predicted / measured:.2f}", source]


def predicted_tokens_per_s(sequences: int) -> float:
    model = plan_model(LLAMA_8B)
    plan = make_plan(model, parse_devices("1xh100", _none_here), Workload.of(model, CONTEXT, sequences))
    assert plan.best.speed is not None
    return plan.best.speed.tokens_per_s


def _none_here() -> DeviceSet:
    raise AssertionError("the devices are named")
