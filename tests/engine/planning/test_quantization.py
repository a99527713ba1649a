"""The matrices that a config.json declares quantized: by names, parts of names, and patterns, whose matching time is bounded."""

import pytest

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.tensor_sizes import WeightShape
from pilotlight.engine.planning.quantization import read_quantization


def quantized(*ignore: str) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": list(ignore)}
    }


@pytest.mark.parametrize(
    ("pattern", "is_ignored"),
    [
        (r"re:.*self_attn.*", True),
        (r"re:.*\.(q|k)_proj$", True),
        (r"re:^(?!.*experts).*q_proj", True),
        (r"re:.*mlp.*gate.*", False),
        ("self_attn", True),
        ("lm_head", False),
    ],
)
def test_patterns_and_names_are_ignored(pattern: str, is_ignored: bool) -> None:
    quantization = read_quantization(quantized(pattern))
    assert quantization is not None
    shape = WeightShape("attention", "model.layers.0.self_attn.q_proj", 64, 64)
    assert quantization.holds(shape) is not is_ignored


def test_modelopt_has_eight_bits_and_its_other_formats_are_refused() -> None:
    described = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    quantization = read_quantization({"quantization_config": described})
    assert quantization is not None
    assert (quantization.bits, quantization.is_float, quantization.ignored) == (8, True, ("lm_head",))
    with pytest.raises(CheckpointError, match="quant_algo = 'NVFP4'; supported for modelopt are FP8"):
        read_quantization({"quantization_config": described | {"quant_algo": "NVFP4"}})


@pytest.mark.parametrize(
    ("ignore", "reason"),
    [
        (["re:(a+)+$"], "repeats a group"),
        (["re:(a|aa)*b"], "repeats a group"),
        (["re:" + ".*a" * 4], "more than 3 parts"),
        (["re:" + ".*=" * 4], "more than 3 parts"),
        (["re:" + "a" * 301], "more than 3 parts"),
        (["re:["], "invalid pattern"),
        ([f"re:a{i}" for i in range(65)], "65 patterns to ignore, of at most 64"),
    ],
)
def test_patterns_that_may_take_for_ever_are_refused_by_name(ignore: list[str], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        read_quantization(quantized(*ignore))
