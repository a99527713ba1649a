"""Experts as DeepSeek-V3 has them, and the families that took them over: a few dense layers first, then layers of experts that sigmoids with a
balancing bias choose, in groups, with shared experts beside them; layers behind the last one that predict further tokens.

Tensors are called alike in all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import DecoderConfig, read_top_k, refuse_unless
from pilotlight.engine.description.shapes import ExpertsShape, GroupedRouting
from pilotlight.engine.description.tensor_sizes import WeightShape, experts, gated
from pilotlight.engine.weights.config import flag, positive_int, positive_number, whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMoeConfig(DecoderConfig):
    intermediate_size: int  # of dense layers
    experts: ExpertsShape
    routing: GroupedRouting
    num_shared: int
    sparse_layers: frozenset[int]
    num_mtp_layers: int  # behind the others: they predict further tokens
    drafts_by_mtp: bool = False  # by the first of these

    @property
    def shared_size(self) -> int:
        """Channels of the shared experts, which are one feed-forward."""
        return self.num_shared * self.experts.intermediate_size

    def feed_forward_weights(self, layer: int, name: str) -> list[WeightShape]:
        """Return the tensors of a layer's feed-forward, whose names begin with `name`."""
        if layer not in self.sparse_layers:
            return gated(name, self.hidden_size, self.intermediate_size)
        gate, num_experts, shared = f"{name}.gate", self.experts.num_experts, self.shared_size
        return [
            WeightShape("router", gate, num_experts, self.hidden_size, is_wide=True),
            WeightShape("router", f"{gate}.e_score_correction_bias", num_experts, is_wide=True),
            *experts(f"{name}.experts", self.experts, self.routing.top_k),
            *(gated(f"{name}.shared_experts", self.hidden_size, shared, part="shared_experts") if shared else []),
        ]


def read_experts(config: Mapping[str, Any], groups: int = 1, top_groups: int = 1, scale: float = 1.0) -> dict[str, Any]:
    """Read the fields that GroupedMoeConfig adds. `groups`, `top_groups`, `scale`: what a config.json without them means."""
    num_layers, num_experts = positive_int(config, "num_hidden_layers"), positive_int(config, "n_routed_experts")
    dense, every = whole_number(config, "first_k_dense_replace", num_layers), positive_int(config, "moe_layer_freq", 1)
    hidden, intermediate = positive_int(config, "hidden_size"), positive_int(config, "moe_intermediate_size")
    return {
        "intermediate_size": positive_int(config, "intermediate_size"),
        "experts": ExpertsShape(num_experts, hidden, intermediate),
        "routing": _routing(config, num_experts, groups, top_groups, scale),
        "num_shared": whole_number(config, "n_shared_experts", num_experts),
        "sparse_layers": frozenset(i for i in range(dense, num_layers) if i % every == 0),
        "num_mtp_layers": whole_number(config, "num_nextn_predict_layers", num_layers),
    }


def _routing(config: Mapping[str, Any], num_experts: int, groups: int, top_groups: int, scale: float) -> GroupedRouting:
    refuse_unless(config, "scoring_func", "sigmoid", None)
    refuse_unless(config, "topk_method", "noaux_tc", None)
    top_k = read_top_k(config, num_experts)
    groups, top_groups = positive_int(config, "n_group", groups), positive_int(config, "topk_group", top_groups)
    size = num_experts // groups
    if num_experts % groups or top_groups > groups or top_k > top_groups * size or (size < 2 and top_groups < groups):
        raise CheckpointError(
            f"config.json has n_group = {groups}, topk_group = {top_groups} and num_experts_per_tok = {top_k} for {num_experts} experts: "
            "groups must be even, of two experts at least, and the chosen ones must hold as many as a token goes to"
        )
    scale = positive_number(config, "routed_scaling_factor", scale)
    return GroupedRouting(top_k, groups, top_groups, flag(config, "norm_topk_prob", True), scale)
