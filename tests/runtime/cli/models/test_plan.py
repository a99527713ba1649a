"""`pilotlight plan`: tables, JSON, and one sentence for models that cannot be planned."""

import json
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.planning.devices import GIB, Device, DeviceSet, cpu
from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.models.plan import PlanRequest, plan
from pilotlight.runtime.hosts.devices import this_machine
from pilotlight.runtime.hosts.gpus import Gpu

SCOUT = str(Path(__file__).parents[3] / "engine" / "planning" / "configs" / "llama-4-scout.json")


def told(capsys: pytest.CaptureFixture[str], **question: Any) -> dict[str, Any]:
    plan(PlanRequest(**question), True, lambda _dtype: cpu(), lambda: this_machine(lambda: None))
    return dict(json.loads(capsys.readouterr().out))


def test_json_names_bytes_of_every_rank_and_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, model=SCOUT, devices="2xh200", context_length=1 << 20, price_per_hour=3.5)
    best = found["splits"][0]
    assert (best["tp"], best["pp"], best["ep"], best["fits"]) == (2, 1, 1, True)
    assert {"weights_bytes", "kv_bytes", "kv_tokens", "activations_bytes"} <= best["ranks"][0].keys()
    assert best["total_kv_bytes"] == sum(rank["kv_bytes"] for rank in best["ranks"]) > 56 * GIB
    assert best["total_kv_tokens"] >= 1_200_000
    assert best["cost_per_million_tokens"] > 0
    assert "assumed" in best["speed"]["efficiency"]


def test_people_see_the_best_split_the_others_and_the_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    plan(PlanRequest(SCOUT, "2xh200"))
    said = capsys.readouterr().out
    assert "Llama4ForConditionalGeneration: 108.6 billion parameters, bfloat16, plain; on 2xh200" in said
    assert "- tp 2, pp 1, ep 1: most tokens a second of those that fit" in said
    assert "of the best one's tokens a second" in said
    assert "NVIDIA's H200 SXM data sheet" in said


def test_the_embedded_model_is_planned_for_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, model="embedded:ember")
    assert found["devices"] == "1xcpu"
    assert found["dtype"] == "float32"
    assert found["splits"][0]["fits"]
    assert "record" in found["splits"][0]["speed"]["efficiency"]


def test_speeds_on_a_cpu_are_predicted_from_those_measured(capsys: pytest.CaptureFixture[str]) -> None:
    dtypes: list[str] = []

    def halved(dtype: str) -> Device:
        dtypes.append(dtype)
        return cpu()._replace(bytes_per_s=cpu().bytes_per_s / 2)

    usual = told(capsys, model="embedded:ember", devices="cpu", batch=1)["splits"][0]
    plan(PlanRequest("embedded:ember", "cpu", batch=1), as_json=True, measure=halved)
    slower = json.loads(capsys.readouterr().out)["splits"][0]
    assert slower["speed"]["token_s"] == pytest.approx(2 * usual["speed"]["token_s"], rel=0.01)
    assert dtypes == ["float32"]


def test_weights_in_12_bits_take_a_quarter_less_and_are_read_faster(capsys: pytest.CaptureFixture[str]) -> None:
    plain = told(capsys, model="embedded:ember", devices="cpu", dtype="bfloat16")["splits"][0]
    coded = told(capsys, model="embedded:ember", devices="cpu", dtype="bfloat16", is_lossless=True)["splits"][0]
    assert 0.74 < coded["total_weights_bytes"] / plain["total_weights_bytes"] < 0.78
    assert coded["speed"]["token_s"] < plain["speed"]["token_s"]


def test_weights_in_12_bits_are_planned_where_a_site_would_have_them() -> None:
    for devices, dtype in (("1xh100", "bfloat16"), ("cpu", "float32")):
        with pytest.raises(CliError, match="--lossless is for plain bfloat16 weights on a CPU"):
            plan(PlanRequest("embedded:ember", devices, dtype=dtype, is_lossless=True))


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        ({"devices": "many"}, "'many' names no devices"),
        (
            {"devices": "8xh100", "tp": 3},
            "tp is 3, and the model has 40 heads and 8 key-value heads; tp may be 1, 2, 4, 8, 40",
        ),
        ({"devices": "h100", "tp": 2}, "tp 2, pp 1, ep 1 needs 2 devices; 1xh100 are given"),
        ({"devices": "8xh100", "context_length": 1}, "the context is 1 tokens; the model takes from 2"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"dtype": "int8"}, "--dtype must be one of auto, float32, bfloat16, not int8"),
        ({"kv_dtype": "int8", "devices": "8xh100"}, "--kv-dtype must be one of auto, fp8, not int8"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(question: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CliError) as refused:
        plan(PlanRequest(**({"model": SCOUT} | question)))
    assert sentence in str(refused.value)


def test_this_machine_is_its_gpus_or_its_cpu() -> None:
    found = this_machine(lambda: (Gpu("NVIDIA H100 80GB HBM3", 80 * GIB),) * 2)
    assert (found.number, found.device.name, found.device.memory_bytes) == (2, "h100", 80 * GIB)
    assert this_machine(lambda: None) == DeviceSet(1, cpu())
