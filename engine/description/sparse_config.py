"""The config of decoders with experts, some of which have layers that predict further tokens (MTP)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import read_top_k
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.shapes import PLAIN_NAMES, ExpertNames, ExpertsShape, Routing, SparseShape
from pilotlight.engine.description.tensor_sizes import WeightShape, experts, gated, norm
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.weights.config import (
    architecture,
    flag,
    positive_int,
    positive_number,
    refuse_unless,
    whole_number,
)
from pilotlight.engine.weights.fused import FusedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseConfig(DenseConfig):
    """The config of a decoder with experts. `intermediate_size` is that of dense layers."""

    sparse: SparseShape
    sparse_layers: frozenset[int]
    num_mtp_layers: int = 0  # number of additional layers, after the others, that predict further tokens
    drafts_by_mtp: bool = False  # whether the first of these layers is used to draft tokens

    @property
    def mtp_cached_layer(self) -> CachedLayer:
        """The values that the layer which drafts caches: those of the last layer, but without a window."""
        return self.cached_layers[-1]._replace(window=None)

    @property
    def fused(self) -> tuple[FusedRows, ...]:
        """The stacked tensors of experts that a checkpoint may have instead of one tensor per expert."""
        (num_experts, hidden, inner), names = self.sparse.experts, self.sparse.names
        stack, (*ups, down) = f"{names.mlp}.{names.experts}".removeprefix("."), names.parts
        each, both = f"{stack}.{{expert}}", "gate_up_proj" if len(ups) > 1 else "up_proj"
        return (
            *DenseConfig.fused.fget(self),  # type: ignore[attr-defined]
            FusedRows(f"{stack}.{both}", {f"{each}.{up}": inner for up in ups}, num_experts),
            FusedRows(f"{stack}.down_proj", {f"{each}.{down}": hidden}, num_experts),
        )

    def feed_forward_weights(self, layer: int, name: str) -> list[WeightShape]:
        if layer not in self.sparse_layers:
            return DenseConfig.feed_forward_weights(self, layer, name)
        shape, routing, shared_size, names, _, parallel = self.sparse
        hidden, num_experts, mlp = self.hidden_size, shape.num_experts, names.inside(name)
        found = [WeightShape("router", f"{mlp}.{names.router}", num_experts, hidden, is_wide=routing.is_wide)]
        if routing.is_biased:
            found.append(WeightShape("router", f"{mlp}.{names.bias}", num_experts, is_wide=True))
        if routing.norm_eps is not None:
            sizes = zip(names.router_scales, (hidden, num_experts), strict=True)
            found += [WeightShape("router", f"{mlp}.{part}", size, is_wide=True) for part, size in sizes]
        found += experts(f"{mlp}.{names.experts}", shape, routing.top_k, names.parts)
        if shape.hidden_size != hidden:
            narrow, wide = (f"{mlp}.{name}" for name in names.latent)
            found += [
                WeightShape("shared_experts", narrow, shape.hidden_size, hidden),
                WeightShape("shared_experts", wide, hidden, shape.hidden_size),
            ]
        if shared_size:
            found += gated(
                f"{mlp}.{names.shared}", hidden, shared_size, part="shared_experts", names=self.feed_forward_parts
            )
        if names.shared_gate is not None:
            found.append(WeightShape("shared_experts", f"{mlp}.{names.shared_gate}", 1, hidden))
        if parallel is not None:
            found += [norm(f"{name}.{part}", hidden) for part in parallel]
            found += DenseConfig.feed_forward_weights(self, layer, name)
        return found


def read_softmax_experts(
    config: Mapping[str, Any],
    num_experts_key: str,
    *,
    size_key: str = "intermediate_size",
    default_experts: int | None = None,
    default_top_k: int = 8,
    renormalise: bool,
    names: ExpertNames = PLAIN_NAMES,
    shared_size: int = 0,
) -> SparseShape:
    """Return the shape of experts that a softmax chooses, as in Mixtral."""
    num_experts = positive_int(config, num_experts_key, default_experts)
    shape = ExpertsShape(num_experts, positive_int(config, "hidden_size"), positive_int(config, size_key))
    routing = Routing(read_top_k(config, num_experts, default_top_k), renormalise)
    return SparseShape(shape, routing, shared_size, names)


def read_grouped_experts(
    config: Mapping[str, Any], groups: int = 1, top_groups: int = 1, scale: float = 1.0
) -> dict[str, Any]:
    """Return the fields that SparseConfig adds, for a model like DeepSeek-V3.

    The first few layers are dense. In the others, sigmoids with a balancing bias choose experts in groups, and there may be shared experts. `groups`,
    `top_groups`, `scale`: defaults for a config.json without these keys.
    """
    refuse_unless(config, "scoring_func", "sigmoid", None)
    refuse_unless(config, "topk_method", "noaux_tc", None)
    return read_experts_in_groups(
        config,
        Routing(
            0,
            flag(config, "norm_topk_prob", True),
            positive_number(config, "routed_scaling_factor", scale),
            "sigmoid",
            positive_int(config, "n_group", groups),
            positive_int(config, "topk_group", top_groups),
            is_biased=True,
            is_wide=True,
        ),
    )


def read_experts_in_groups(config: Mapping[str, Any], rule: Routing) -> dict[str, Any]:
    """Return the fields that SparseConfig adds, from a config.json with DeepSeek's names.

    `rule`: the routing rule, of which `top_k` is still to be set.
    """
    num_layers, num_experts = positive_int(config, "num_hidden_layers"), positive_int(config, "n_routed_experts")
    top_k = read_top_k(config, num_experts)
    size = num_experts // rule.groups
    if (
        num_experts % rule.groups
        or rule.top_groups > rule.groups
        or top_k > rule.top_groups * size
        or (size < rule.group_best and rule.top_groups < rule.groups)
    ):
        raise CheckpointError(
            f"config.json has n_group = {rule.groups}, topk_group = {rule.top_groups} and num_experts_per_tok = {top_k} for {num_experts} experts: "
            "groups must have equal sizes of at least two experts, and the chosen groups at least num_experts_per_tok experts"
        )
    intermediate = positive_int(config, "moe_intermediate_size")
    shape = ExpertsShape(num_experts, positive_int(config, "hidden_size"), intermediate)
    return {
        "intermediate_size": positive_int(config, "intermediate_size"),
        "sparse": SparseShape(
            shape,
            rule._replace(top_k=top_k),
            whole_number(config, "n_shared_experts", num_experts) * intermediate,
        ),
        "sparse_layers": layers_with_experts(config, num_layers),
        "num_mtp_layers": whole_number(config, "num_nextn_predict_layers", num_layers),
    }


def layers_with_experts(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Return the layers with experts: those in config.json, or every n-th except the first, dense layers."""
    kinds = config.get("mlp_layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
            raise CheckpointError(
                f"config.json has mlp_layer_types = {kinds!r}; for {architecture(config)} it must be a list of {num_layers}: dense or sparse"
            )
        return frozenset(i for i, kind in enumerate(kinds) if kind == "sparse")
    dense, every = whole_number(config, "first_k_dense_replace", num_layers), positive_int(config, "moe_layer_freq", 1)
    return frozenset(i for i in range(dense, num_layers) if i % every == 0)
