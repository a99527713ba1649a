"""Steps of serving compile no kernel and do not wait for the device. A dry run, which needs no weights, names all kernels that real steps launch.
Within a step no value is read from the device, and all copies use pinned memory. The steps are the product's, of every family and format, with
decodes, prompts, both at once, tokens that only the device knows, padded recordings and every kind of sampling. They run in a separate process,
tests/engine/variants.py, where Triton compiles; here it interprets.
"""

import json
from typing import Any

import pytest

from tests.kernels.triton.conftest import run_module

pytest.importorskip("triton")

pytestmark = [pytest.mark.cpu_only, pytest.mark.timeout(900)]  # without a cache every kernel is compiled

SOME = ("gpt-oss",)  # launches more kernels than a llama


def variants(*words: str, **environment: str) -> dict[str, dict[str, Any]]:
    printed = run_module("tests.engine.variants", *words, PILOTLIGHT_TRITON="1", **environment)
    found: dict[str, dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return found


def assert_all_are_known(found: dict[str, dict[str, Any]]) -> None:
    for model, row in found.items():
        assert row["launched"] >= 20, model
        assert row["new"] == [], f"{model} would compile these while requests wait"
        assert row["never"] == [], f"{model} compiles these for nothing"
        assert row["waits"] == {}, f"steps of {model} wait for the device before they are collected"
        assert row["copies"] > 0, "copies must be counted, or waits would be missed"


@pytest.mark.process
def test_real_steps_launch_what_the_dry_run_has_named_nothing_else_and_wait_for_no_device() -> None:
    assert_all_are_known(variants("--only", *SOME))


@pytest.mark.process
def test_a_dry_run_launches_a_layer_of_each_kind_however_many_there_are() -> None:
    few, many = variants("--only", "llama", "--layers", "2", "6")["llama"]["launches"]
    assert few == many > 20


@pytest.mark.process
@pytest.mark.slow
def test_so_do_those_of_every_family_and_format_and_all_of_it_compiles_for_hopper() -> None:
    found = variants("--compile")
    assert_all_are_known(found)
    assert len(found) >= 13
    assert all(row["compiled"] == row["known"] for row in found.values())
