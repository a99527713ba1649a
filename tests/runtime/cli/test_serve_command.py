"""`pilotlight serve` with parallelism: the devices of a host, and how they share the model."""

from typing import Any

import pytest

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.serve_command import Served


def served(**degrees: int | bool) -> Served:
    return Served("embedded:ember", "127.0.0.1", 8000, device="cpu")._replace(**degrees)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_gib": -1.0}, "--kv-gib: must be above 0, not -1.0"),
        ({"device": "gpu"}, "--device: 'gpu' is not a device: use auto, cpu, cuda or cuda:N"),
        ({"dtype": "int3"}, "--dtype: must be 'auto', 'float32' or 'bfloat16', not 'int3'"),
        ({"max_model_len": 3}, "--max-model-len: must be at least 16, not 3"),
        ({"adapters": ("a b=c",)}, "--adapter.0.name: must match"),
    ],
)
def test_a_value_that_is_refused_is_named_by_its_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CliError) as refused:
        served()._replace(**options).site()
    assert str(refused.value).startswith(message)


def test_devices_with_sequences_of_their_own_are_a_group() -> None:
    engine = served(dp=2, pp=2, expert_parallel=True).engine
    assert engine["devices"] == [["cpu"] * 4]
    assert (engine["stages"], engine["data_parallel"], engine["expert_parallel"]) == (2, 2, True)
    of_two = served(dp=2, tp=2, expert_parallel=True).engine
    assert (of_two["devices"], of_two["data_parallel"]) == ([["cpu"] * 4], 2)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"dp": 2}, "--dp spreads whole experts over its devices: give --expert-parallel as well."),
        ({"expert_parallel": True}, "among the devices of --tp or --dp: give either more than one."),
        ({"redundant_experts": 2}, "--redundant-experts needs --expert-parallel: give that as well."),
        ({"dp": 2, "expert_parallel": True, "num_prefill": 1, "num_decode": 1}, "drop either."),
    ],
)
def test_degrees_that_do_not_go_together_are_refused(degrees: dict[str, int | bool], message: str) -> None:
    with pytest.raises(CliError) as refused:
        _ = served(**degrees).engine
    assert message in str(refused.value)
