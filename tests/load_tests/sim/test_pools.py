"""Pools of devices at a simulated site, compared with queueing theory and the runtime's rule, and the effects of each arrangement."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from load_tests.sim.pools import (
    ARRANGEMENTS,
    LINK_TOKENS_PER_S,
    NUM_DEVICES,
    PREFILL_TOKENS_PER_S,
    WORKLOADS,
    Arrangement,
    Device,
    Found,
    PooledSequence,
    Pools,
    Workload,
    arrivals,
    hand_over_pays,
)
from load_tests.sim.site import STEP_GROWTH, STEP_S
from pilotlight.engine.api.protocol import SamplingParams, Submit
from pilotlight.runtime.dispatch import dispatcher
from pilotlight.runtime.dispatch.assignments import Assignments
from pilotlight.support.estimates import HAND_OVER_S

NO_SPLIT, BY_REQUESTS, BY_TOKENS, WHERE_IT_PAYS = ARRANGEMENTS
BY_NAME = {workload.name: workload for workload in WORKLOADS}


def found(arrangement: Arrangement, workload: str, load: float, requests: int = 600) -> Found:
    return Pools(arrangement, BY_NAME[workload]).run(arrivals(BY_NAME[workload], load, requests, 1))


def test_a_lone_request_takes_its_prompt_and_a_hand_over_and_its_steps() -> None:
    lone = [(100.0 * i, 4500, 101) for i in range(10)]
    here = Pools(NO_SPLIT, Workload("x", 4500, 101)).run(lone)
    assert here.ttft_p90_ms == pytest.approx(1000)
    assert here.itl_p99_ms == pytest.approx(1000 * STEP_S * (1 + STEP_GROWTH))
    there = Pools(BY_TOKENS, Workload("x", 4500, 101)).run(lone)
    hand_over_ms = 1000 * (HAND_OVER_S + 512 / LINK_TOKENS_PER_S)
    assert there.ttft_p90_ms == pytest.approx(1000 + hand_over_ms + here.itl_p99_ms)
    assert there.handed_over == 1


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda each: each.name)
def test_every_token_comes_once(arrangement: Arrangement) -> None:
    drawn = arrivals(BY_NAME["chat"], 0.5, 500, 3)
    pools = Pools(arrangement, BY_NAME["chat"])
    pools.run(drawn)
    assert len(pools.ttft_s) == 400  # a fifth of 500 is warm-up
    assert sum(pools.gaps.values()) == sum(output - 1 for _, _, output in drawn)
    devices = [*pools.computing, *pools.answering]
    assert len(devices) == NUM_DEVICES
    assert [(device.num_open, device.prompt_tokens) for device in devices] == [(0, 0)] * NUM_DEVICES


def test_prompts_set_apart_leave_answers_alone_and_wait_longer_where_half_the_devices_do_not_compute_them() -> None:
    whole, split = found(NO_SPLIT, "documents", 0.5), found(BY_TOKENS, "documents", 0.5)
    assert split.itl_p99_ms < 0.7 * whole.itl_p99_ms
    assert split.ttft_p90_ms > 1.3 * whole.ttft_p90_ms


def test_unequal_prompts_are_balanced_by_tokens_better_than_by_requests() -> None:
    assert found(BY_TOKENS, "documents", 0.5).ttft_p90_ms < 0.9 * found(BY_REQUESTS, "documents", 0.5).ttft_p90_ms


def test_a_prompt_is_handed_over_where_the_runtime_would() -> None:
    rng, told = random.Random(4), []
    for _ in range(400):
        prompt, link = rng.choice((8, 63, 100, 700, 9000)), rng.choice((1000.0, LINK_TOKENS_PER_S))
        answers, other = _busy(rng, 0), _busy(rng, 1)
        ours = hand_over_pays(prompt, answers, other, link)
        told.append(ours)
        assert ours == _runtime_hands_over(prompt, answers, other, link)
    assert 100 < sum(told) < 300


def _busy(rng: random.Random, number: int) -> Device:
    device = Device(number, prompt_tokens=rng.choice((0, 500, 5000)))
    for i in range(rng.choice((0, 1, 8))):
        device.running.append((1, i, PooledSequence(0.0, 1, 1, True, 0, device)))
    return device


def _runtime_hands_over(prompt: int, answers: Device, other: Device, link_tokens_per_s: float) -> bool:
    """Return the decision of pilotlight.runtime.dispatch.dispatcher for two replicas with the same work."""
    replicas: list[Any] = []
    for device, role in ((answers, "decode"), (other, "prefill")):
        load = SimpleNamespace(
            prefill_tokens_per_s=PREFILL_TOKENS_PER_S, decode_tokens_per_s=1 / STEP_S, handed_over_tokens_per_s=link_tokens_per_s
        )  # fmt: skip
        work = SimpleNamespace(sequences=device.num_open, prefill_tokens=device.prompt_tokens, decode_tokens=0)
        host = SimpleNamespace(index=len(replicas), role=role, device="cuda:0")
        prefixes = SimpleNamespace(held_tokens=lambda chain: 0)
        replicas.append(
            SimpleNamespace(model="m", host=host, load=load, work=work, prefixes=prefixes, takes_prompts=True)
        )
    states = cast("Any", {"m": SimpleNamespace(name="m", replicas=replicas)})
    submit = Submit("s", "m", (1,) * prompt, SamplingParams(1))
    nothing = cast("Any", None)
    dispatch = dispatcher.Dispatch(states, nothing, Assignments(states, has_choice=True), nothing)
    return dispatch.choose(submit, replicas).prefill is not None
