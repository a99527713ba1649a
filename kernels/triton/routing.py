"""Routing of tokens to experts: one program per token takes the best scores one after the other.

Of experts with equal scores the first is taken. Logits that are NaN select existing experts, so that later kernels read only existing memory.
"""

import torch
import triton
import triton.language as tl

from pilotlight.kernels.triton.jit import jit
from pilotlight.kernels.triton.launch import check_launch, dense_rows

MOST_EXPERTS = 1024


@jit
def _route(
    logits,
    weights,
    ids,
    logits_token,
    experts,
    top_k,
    RENORMALISE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    is_free = expert < experts
    scores = tl.load(logits + token * logits_token + expert, mask=is_free, other=float("-inf")).to(tl.float32)
    top = tl.max(scores, axis=0)
    total = tl.sum(tl.exp(scores - top), axis=0)
    chosen = tl.zeros([SLOTS], tl.float32)
    chosen_ids = tl.zeros([SLOTS], tl.int32)
    for i in range(top_k):
        best = tl.max(tl.where(is_free, scores, float("-inf")), axis=0)
        best_id = tl.min(tl.where(is_free & (scores == best), expert, EXPERTS), axis=0)
        best_id = tl.minimum(best_id, experts - 1)  # if logits are NaN, no expert's logit equals the best
        chosen = tl.where(slot == i, tl.exp(best - top), chosen)
        chosen_ids = tl.where(slot == i, best_id, chosen_ids)
        is_free = is_free & (expert != best_id)
    if RENORMALISE:
        total = tl.sum(chosen, axis=0)
    tl.store(weights + token * top_k + slot, chosen / total, mask=slot < top_k)
    tl.store(ids + token * top_k + slot, chosen_ids.to(tl.int64), mask=slot < top_k)


@jit
def _route_in_groups(
    logits, bias, weights, ids, logits_token, groups, group_size, top_groups, top_k, scale,
    RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group, member, slot = tl.arange(0, GROUPS), tl.arange(0, SIZE), tl.arange(0, SLOTS)
    is_free = (group < groups)[:, None] & (member < group_size)[None, :]
    expert = tl.where(is_free, group[:, None] * group_size + member[None, :], GROUPS * SIZE)
    scores = tl.sigmoid(tl.load(logits + token * logits_token + expert, mask=is_free, other=0.0).to(tl.float32))
    biased = tl.where(is_free, scores + tl.load(bias + expert, mask=is_free, other=0.0).to(tl.float32), float("-inf"))
    if top_groups < groups:
        first = tl.max(biased, axis=1)
        first_member = tl.min(tl.where(biased == first[:, None], member[None, :], SIZE), axis=1)
        second = tl.max(tl.where(member[None, :] == first_member[:, None], float("-inf"), biased), axis=1)
        both = first + second
        is_left = group < groups
        for _ in range(top_groups):
            best = tl.max(tl.where(is_left, both, float("-inf")), axis=0)
            best_group = tl.min(tl.where(is_left & (both == best), group, GROUPS), axis=0)
            is_left = is_left & (group != best_group)
        is_free = is_free & ((group < groups) & (is_left == 0))[:, None]
    chosen = tl.zeros([SLOTS], tl.float32)
    chosen_ids = tl.zeros([SLOTS], tl.int32)
    for i in range(top_k):
        best = tl.max(tl.max(tl.where(is_free, biased, float("-inf")), axis=1), axis=0)
        best_id = tl.min(tl.min(tl.where(is_free & (biased == best), expert, GROUPS * SIZE), axis=1), axis=0)
        best_id = tl.minimum(best_id, groups * group_size - 1)
        weight = tl.sum(tl.sum(tl.where(expert == best_id, scores, 0.0), axis=1), axis=0)
        chosen = tl.where(slot == i, weight, chosen)
        chosen_ids = tl.where(slot == i, best_id, chosen_ids)
        is_free = is_free & (expert != best_id)
    if RENORMALISE:
        chosen = chosen / (tl.sum(chosen, axis=0) + 1e-20)
    tl.store(weights + token * top_k + slot, chosen * scale, mask=slot < top_k)
    tl.store(ids + token * top_k + slot, chosen_ids.to(tl.int64), mask=slot < top_k)


def route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute route of kernels/moe.py; of equal logits take the first."""
    check_launch("route", "logits", logits.shape[1], "experts", MOST_EXPERTS)
    logits = dense_rows(logits)
    tokens, experts = logits.shape
    weights, ids = _chosen(logits, top_k)
    if tokens:
        _route[(tokens,)](
            logits, weights, ids, logits.stride(0), experts, top_k,
            RENORMALISE=renormalise, EXPERTS=triton.next_power_of_2(experts), SLOTS=triton.next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return weights, ids


def route_in_groups(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, groups: int, top_groups: int, renormalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute route_in_groups of kernels/moe.py; of equal scores take the first."""
    check_launch("route_in_groups", "logits", logits.shape[1], "experts", MOST_EXPERTS)
    logits = dense_rows(logits)
    tokens, experts = logits.shape
    weights, ids = _chosen(logits, top_k)
    if tokens:
        size = experts // groups
        _route_in_groups[(tokens,)](
            logits, bias.contiguous(), weights, ids, logits.stride(0), groups, size, top_groups, top_k, scale,
            RENORMALISE=renormalise, GROUPS=triton.next_power_of_2(groups), SIZE=triton.next_power_of_2(size),
            SLOTS=triton.next_power_of_2(top_k), num_warps=1,
        )  # fmt: skip
    return weights, ids


def _chosen(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    return weights, torch.empty(shape, dtype=torch.int64, device=logits.device)
