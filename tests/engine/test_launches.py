"""Launching a step on a GPU, if there is one, does not wait for the device, and does not fail while another model loads."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotlight.engine.execution.runner import ModelRunner
from tests.engine.driver import drain, load_engine, random_prompt, submit
from tests.engine.test_overlap import KINDS

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has nothing to wait for")


def gated(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call` so that any wait for the device raises an error."""

    def run(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return run


@on_a_gpu
def test_no_launch_of_a_step_waits_for_the_device(checkpoint: Path) -> None:
    """The steps have prompts, decodes and both, with every kind of sampling, before and after they are recorded."""
    engine = load_engine(checkpoint, depth=2)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    runner.forward = gated(runner.forward)
    runner.choose = gated(runner.choose)
    requests = [
        submit(f"{name} {n}", random_prompt(n, seed=n), **{"max_tokens": 30, **kind})
        for n in (4, 33)
        for name, kind in KINDS.items()
    ]
    heard = drain(engine, requests)
    assert all(one.finish_reason == "length" for one in heard.values()), heard


def test_a_model_is_recorded_while_another_one_loads(checkpoint: Path) -> None:
    """This happens when a model wakes beside a serving one: neither may disturb the other."""
    expected = drain(load_engine(checkpoint), [submit("a", random_prompt(9, seed=1), max_tokens=200)])
    engine, loaded, is_over = load_engine(checkpoint), [], threading.Event()

    def keep_loading() -> None:
        while not is_over.is_set():
            loaded.append(load_engine(checkpoint))

    thread = threading.Thread(target=keep_loading)
    thread.start()
    try:
        heard = drain(engine, [submit("a", random_prompt(9, seed=1), max_tokens=200)])
    finally:
        is_over.set()
        thread.join()
    assert heard["a"].token_ids == expected["a"].token_ids
    assert heard["a"].finish_reason == "length"
    assert loaded, "nothing was loaded meanwhile"
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.graphs is None or runner.graphs.num_graphs > 0 or not torch.cuda.is_available()
