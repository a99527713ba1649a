"""Predicts the speed of a split with a roofline model.

Bytes and FLOPs are divided by the peak speeds of the devices, times the share of the peak that steps reach. A prediction names the source of this
share: a recorded measurement or an assumption.
"""

from math import prod
from typing import NamedTuple

from pilotlight.engine.description.tensor_sizes import VOCABULARY_UNIT, WeightShape
from pilotlight.engine.kv.pool.groups import CacheGroups
from pilotlight.engine.planning.devices import Device
from pilotlight.engine.planning.memory_plan import RankMemory
from pilotlight.engine.planning.model_plan import PlannedModel
from pilotlight.engine.planning.parallelism import Parallelism, RankPlace
from pilotlight.engine.weights.shard import Shard

# Assumed fixed seconds of a collective, by is_cpu: two kernels on a GPU, two messages between processes of one machine on a CPU.
_COLLECTIVE_S = {False: 12e-6, True: 60e-6}


class Speed(NamedTuple):
    """Predictions for one model on one split."""

    ttft_s: float  # time to first token of a prompt that runs alone
    token_s: float  # seconds between tokens of one sequence, if `batch` sequences decode at once
    tokens_per_s: float  # output tokens of all sequences
    batch: int
    efficiency: str  # source of the shares of peak speeds


def predict(
    model: PlannedModel,
    parallelism: Parallelism,
    ranks: list[RankMemory],
    device: Device,
    context_length: int,
    prompt_tokens: int,
    batch: int,
) -> Speed:
    """Predict the speed from the slowest rank of each stage.

    `batch`: number of sequences that decode at once, each with a context of `context_length`.
    """
    share = device.efficiency
    steps, prompts = [], []
    for stage in range(parallelism.pp):
        place = RankPlace(parallelism, 0, stage)
        memory = ranks[stage * parallelism.per_stage]
        at_once = -(-batch // (parallelism.copies * parallelism.pp))  # sequences of this rank in one step
        read = _read_bytes(model, place, memory, at_once * parallelism.copies)
        read += at_once * _kv_bytes_of(memory, context_length) * model.config.read_share(context_length)
        products = _products(model, place)
        decode_s = max(
            read / (device.bytes_per_s * share.decode), 2 * products * at_once / (device.flop_per_s * share.prefill)
        )
        steps.append(decode_s + _exchange_s(model, place, device, at_once))
        layers = len(model.stages(parallelism.pp)[stage])
        attended = layers * model.config.attention_products(prompt_tokens // 2 + 1) / parallelism.tp
        prompt_s = 2 * (products + attended) * prompt_tokens / (device.flop_per_s * share.prefill)
        floor_s = memory.weights_bytes / (device.bytes_per_s * share.decode)
        prompts.append(max(prompt_s, floor_s) + _exchange_s(model, place, device, prompt_tokens))
    token_s = sum(steps)
    return Speed(sum(prompts), token_s, batch / token_s, batch, share.source)


class RoutedCounts(NamedTuple):
    """Tokens that one rank exchanges with others for experts, summed over a stage's layers.

    A token counts once for each other rank that it is sent to or comes from.
    """

    sent: float
    received: float


class ExchangedBytes(NamedTuple):
    """The messages of a rank in one step of a stage.

    Ranks that share matrices sum hidden states and join logits. Copies of the attention with different sequences exchange rows, from every rank to
    every other.
    """

    sums: int
    summed_bytes: int
    joins: int
    joined_bytes: int  # bytes of all ranks' parts, each padded to the widest
    exchanges: int = 0
    exchanged_bytes: int = 0  # bytes that go to other ranks


def exchanged(
    model: PlannedModel, place: RankPlace, tokens: int, rows: int, routed: RoutedCounts | None = None
) -> ExchangedBytes:
    """Return the messages of a step with `tokens` tokens and `rows` rows of logits.

    If there are several copies of the attention, the counts are those of this rank's copy. Shared matrices need two sums in each layer; the first
    stage adds one after the embedding, and one join of the vocabulary. Copies need three exchanges in each layer of experts: the number of tokens for
    each rank, the tokens with the ids and weights of their experts, and the results. The first stage adds one exchange of the rows whose logits are
    needed. `routed`: if None, the numbers that are expected if all experts are equally likely.
    """
    shared, between = _of_shared_matrices(model, place, tokens, rows), (0, 0)
    if place.parallelism.copies > 1:
        between = _between_copies(model, place, rows, routed or likely_routed(model, place, tokens))
    return ExchangedBytes(*shared, *between)


def _between_copies(model: PlannedModel, place: RankPlace, rows: int, routed: RoutedCounts) -> tuple[int, int]:
    others, sparse, is_first = place.parallelism.ep - 1, _sparse_layers(model, place), place.stage == 0
    hidden = model.config.hidden_size * model.item_bytes
    with_experts = hidden + 8 * max((shape.active for shape in sparse), default=0)
    num_bytes = len(sparse) * 8 * others + routed.sent * with_experts + routed.received * hidden
    if is_first and place.copy:
        num_bytes += rows * hidden
    return 3 * len(sparse) + (is_first and rows > 0), round(num_bytes)


def _of_shared_matrices(model: PlannedModel, place: RankPlace, tokens: int, rows: int) -> tuple[int, int, int, int]:
    tp, config = place.parallelism.tp, model.config
    if tp == 1 < place.parallelism.copies:
        return 0, 0, 0, 0
    is_first, has_head = place.stage == 0, place.stage == place.copy == 0
    sums = is_first + 2 * len(model.stages(place.parallelism.pp)[place.stage])
    spans = [Shard(rank, tp).span(config.vocab_size, VOCABULARY_UNIT) for rank in range(tp)]
    widest = max(span.size for span in spans)
    num_bytes = sums * tokens * config.hidden_size * model.item_bytes
    return sums, num_bytes, int(has_head and rows > 0), tp * rows * widest * 4 * has_head


def likely_routed(model: PlannedModel, place: RankPlace, tokens: int) -> RoutedCounts:
    """Return the expected numbers of tokens that a rank sends to other ranks and receives.

    All ranks are assumed to have `tokens` tokens.
    """
    ep, likely = place.parallelism.ep, 0.0
    for shape in _sparse_layers(model, place):
        elsewhere = shape.experts - shape.experts // ep  # experts on other ranks than a given one
        none = prod((elsewhere - i) / (shape.experts - i) for i in range(int(shape.active)))
        likely += (ep - 1) * (1 - none) * tokens
    return RoutedCounts(likely, likely)


def _sparse_layers(model: PlannedModel, place: RankPlace) -> list[WeightShape]:
    """Return one expert matrix of each layer of the stage that has experts."""
    layers = [model.layers[i] for i in model.stages(place.parallelism.pp)[place.stage]]
    found = [next((shape for shape in layer if shape.experts), None) for layer in layers]
    return [shape for shape in found if shape is not None]


def _products(model: PlannedModel, place: RankPlace) -> float:
    """Return the number of multiplications on one rank for one token.

    All experts of a token count, also those on other ranks, because on average as many tokens arrive from other ranks as leave.
    """
    layers = model.stages(place.parallelism.pp)[place.stage]
    total = 0.0
    for layer, shape in model.weights():
        if layer in layers or (layer is None and shape.part == "head" and place.stage == 0):
            _, rows, columns = place.part_of(shape)
            total += rows * columns * shape.active if shape.part not in ("norms", "embedding") else 0
    return total


def _read_bytes(model: PlannedModel, place: RankPlace, memory: RankMemory, tokens: int) -> float:
    """Return the bytes of weights that a step of `tokens` tokens reads.

    Of the experts, it reads the expected number that at least one token uses, if all are equally likely.
    """
    parts = dict(memory.weights)
    for unread in ("embedding", "layer_inputs", "vision"):
        tied = unread == "embedding" and "head" not in parts and place.stage == 0
        if not tied:
            parts.pop(unread, None)
    experts = float(parts.pop("experts", 0))
    shape = next((shape for _, shape in model.weights() if shape.experts), None)
    if shape is not None:
        experts *= shape.num_read(tokens) / shape.experts
    return sum(parts.values()) + experts


def _kv_bytes_of(memory: RankMemory, context_length: int) -> int:
    """Return the bytes of cache that one token with this context reads."""
    if memory.layout is None:
        return 0
    groups = CacheGroups(memory.layout.block_size, 1, memory.layout.windows)
    return groups.most_blocks(context_length, 1) * memory.layout.block_bytes


def _exchange_s(model: PlannedModel, place: RankPlace, device: Device, tokens: int) -> float:
    """Predict the time of a stage's collectives.

    These are two sums of hidden states per layer if ranks share matrices, transfers of tokens to their experts and back if copies of the attention
    share experts, and hidden states to the next stage.
    """
    tp, pp, ep, _ = place.parallelism
    each_s, row = _COLLECTIVE_S[device.is_cpu], model.config.hidden_size * model.item_bytes
    taken = 0.0
    if tp > 1:
        sums = exchanged(model, RankPlace(Parallelism(tp, pp), 0, place.stage), tokens, 0).sums
        taken += sums * (each_s + 2 * (tp - 1) / tp * row * tokens / device.link_bytes_per_s)
    if place.parallelism.copies > 1:  # the ranks of a copy have the same tokens, of which each sends a part
        routed = exchanged(model, RankPlace(Parallelism(1, pp, ep), 1, place.stage), -(-tokens // tp), 1)
        taken += routed.exchanges * each_s + routed.exchanged_bytes / device.link_bytes_per_s
    return taken + (pp > 1) * (each_s + row * tokens / device.link_bytes_per_s)
