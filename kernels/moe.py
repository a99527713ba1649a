"""Mixture of experts: routing of tokens to experts with weights, and the experts' feed-forwards.

All families have the same layout: gate rows, then up rows in one matrix per expert. Loaders convert checkpoints to it. The torch form sorts tokens by
expert, and runs two matmuls for each expert with tokens. It waits for the device to return the number of tokens of each expert; Triton's form does
not. On a CPU this is the fastest way with torch: for 16 experts of 2048 x 768 in fp32 and 8 tokens, one thread of Zen 5 takes 11 ms, with
torch._grouped_mm 22, and with gathered weights 440.
"""

from itertools import accumulate

import torch

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.elementwise.activation import relu2
from pilotlight.kernels.matrices.blocks import BlockWeight
from pilotlight.kernels.matrices.coded import CodedWeight
from pilotlight.kernels.matrices.plain import PlainWeight
from pilotlight.kernels.matrices.weight import GatedActivation, Weight


def _check_route(check: ArgumentCheck, logits: torch.Tensor, top_k: int, _: bool) -> None:
    check.tensor("logits", logits, "tokens experts")
    experts = logits.shape[1]
    check.require("top_k", 0 < top_k <= experts, f"is {top_k}, wanted 1 to {experts}, the number of experts")


@operation(_check_route, triton="routing")
def route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top experts; return weights [tokens, top_k] fp32 and expert ids [tokens, top_k] int64.

    logits [tokens, experts]. Weights are probabilities among all experts. If renormalised, they sum to one, which equals a softmax over the chosen
    logits, so the order of the two steps does not matter.
    """
    logits = logits.float()
    chosen, expert_ids = logits.topk(top_k, dim=-1)
    if renormalise:
        return chosen.softmax(-1), expert_ids
    return (chosen - logits.logsumexp(-1, keepdim=True)).exp(), expert_ids


def _check_groups(
    check: ArgumentCheck,
    logits: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    groups: int,
    top_groups: int,
    renormalise: bool,
    scale: float,
) -> None:
    check.tensor("logits", logits, "tokens experts")
    check.tensor("bias", bias, "experts")
    experts = logits.shape[1]
    check.require(
        "groups", groups > 0 and experts % groups == 0, f"is {groups}, which {experts} experts cannot fill evenly"
    )
    size = experts // groups
    check.require(
        "top_groups", 0 < top_groups <= groups, f"is {top_groups}, wanted 1 to {groups}, the number of groups"
    )
    check.require(
        "groups",
        size > 1 or top_groups == groups,
        "are of one expert each, but groups are chosen by their two best experts",
    )
    most = top_groups * size
    check.require("top_k", 0 < top_k <= most, f"is {top_k}, wanted 1 to {most}, the number of experts in those groups")


@operation(_check_groups, triton="routing")
def route_in_groups(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, groups: int, top_groups: int, renormalise: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the top experts of the top groups.

    Return weights [tokens, top_k] fp32 and expert ids [tokens, top_k] int64. logits [tokens, experts], bias [experts]. Scores are sigmoids of logits.
    Scores plus bias select first the groups of experts whose two best scores have the largest sum, then the best experts in these groups. Weights are
    the scores without bias (DeepSeek-V3 technical report, section 2.1.2), divided by their sum if `renormalise`, and multiplied by `scale`.
    """
    scores = logits.float().sigmoid()
    biased = scores + bias.float()
    if top_groups < groups:
        biased = in_best_groups(biased, groups, top_groups, 2)
    expert_ids = biased.topk(top_k, dim=-1).indices
    weights = scores.gather(1, expert_ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, expert_ids


def in_best_groups(scores: torch.Tensor, groups: int, top_groups: int, num_best: int) -> torch.Tensor:
    """Return scores [tokens, experts], with -inf in all groups except the best.

    Those are the groups whose `num_best` best scores have the largest sums.
    """
    by_group = torch.unflatten(scores, 1, (groups, -1))
    of_groups = by_group.topk(num_best, dim=-1).values.sum(-1)
    is_left = torch.zeros_like(of_groups, dtype=torch.bool)
    is_left.scatter_(1, of_groups.topk(top_groups, dim=-1).indices, True)
    return by_group.masked_fill(~is_left.unsqueeze(-1), -torch.inf).flatten(1)


def _check(
    check: ArgumentCheck,
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: GatedActivation,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> None:
    check.tensor("x", x, "tokens hidden")
    of_both = "intermediate" if activation is relu2 else "2*intermediate"
    gate_up.require(check, "gate_up", f"experts {of_both} hidden", x.dtype)
    if activation is not relu2:
        rows = check.size(of_both)
        check.require("gate_up", rows % 2 == 0, f"has {rows} rows; wanted an even number: half gates, half ups")
        check.derive("intermediate", rows // 2, "gate_up")
    down.require(check, "down", "experts hidden intermediate", x.dtype)
    check.tensor("weights", weights, "tokens top_k", (torch.float32, x.dtype))
    check.tensor("expert_ids", expert_ids, "tokens top_k", (torch.int64,))
    if gate_up_bias is not None:
        check.tensor("gate_up_bias", gate_up_bias, f"experts {of_both}", (x.dtype,))
    if down_bias is not None:
        check.tensor("down_bias", down_bias, "experts hidden", (x.dtype,))
    check.indices("expert_ids", expert_ids, gate_up.shape[0], "the experts there are")


@operation(_check, triton="moe")
def moe_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    activation: GatedActivation,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return each token's weighted sum over its experts, [tokens, hidden].

    x [tokens, hidden]; weights, expert_ids [tokens, top_k]; gate_up [experts, 2 * intermediate, hidden], down [experts, hidden, intermediate], plain
    or packed; biases [experts, rows]; activation as in a gated feed-forward, or relu2, for which gate_up has no gates: [experts, intermediate,
    hidden]. Sums are fp32, in the order of expert_ids, so that no other token
    affects them.
    """
    tokens, top_k = expert_ids.shape
    if not tokens:
        return torch.empty_like(x)
    flat_ids = expert_ids.flatten()
    order = flat_ids.argsort(stable=True)  # pairs of token and expert, sorted by expert
    counts = torch.bincount(flat_ids, minlength=gate_up.shape[0]).tolist()
    by_expert = x.index_select(0, order // top_k)
    outputs = torch.empty_like(by_expert)
    for expert, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        if not count:
            continue
        rows = slice(end - count, end)
        bias = None if gate_up_bias is None else gate_up_bias[expert]
        hidden = _matrix(gate_up, expert, x.dtype).gated(by_expert[rows], bias, activation)
        outputs[rows] = _matrix(down, expert, x.dtype).linear(hidden, None if down_bias is None else down_bias[expert])
    in_order = torch.empty_like(outputs)
    in_order[order] = outputs
    return (in_order.view(tokens, top_k, x.shape[1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _matrix(weight: Weight, expert: int, dtype: torch.dtype) -> Weight:
    """Return an expert's matrix, unpacked unless C can multiply its codes.

    FP8 matrices are unpacked too, because their products would round activations.
    """
    one = weight.expert(expert)
    return one if isinstance(one, CodedWeight | BlockWeight) else PlainWeight(one.unpack(dtype))
