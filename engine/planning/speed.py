"""Predicts the speed of a split with a roofline.

Bytes and products are divided by what the devices move and compute in a second, times the share that steps reach. A prediction names the source of
the share: a record, or an assumption.
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

# The fixed time of a collective: two kernels on a GPU, two messages between processes of one machine on a CPU. Assumed.
_COLLECTIVE_S = {False: 12e-6, True: 60e-6}


class Speed(NamedTuple):
    """Predictions for one model on one split."""

    ttft_s: float  # of a prompt alone
    token_s: float  # seconds between tokens of one sequence, at that batch
    tokens_per_s: float  # of all sequences
    batch: int
    efficiency: str  # where the shares of the ceilings come from


def predict(
    model: PlannedModel,
    parallelism: Parallelism,
    ranks: list[RankMemory],
    device: Device,
    context_length: int,
    prompt_tokens: int,
    batch: int,
) -> Speed:
    """Predict from the slowest rank of each stage.

    `batch`: the number of sequences that decode at once, each with that context.
    """
    share = device.efficiency
    steps, prompts = [], []
    for stage in range(parallelism.pp):
        place = RankPlace(parallelism, 0, stage)
        memory = ranks[stage * parallelism.per_stage]
        at_once = -(-batch // (parallelism.copies * parallelism.pp))  # of this rank, in one step of a pipeline's
        read = _read_bytes(model, place, memory, at_once * parallelism.copies)
        read += at_once * _kv_bytes_of(memory, context_length)
        products = _products(model, place)
        decode_s = max(
            read / (device.bytes_per_s * share.decode), 2 * products * at_once / (device.flop_per_s * share.prefill)
        )
        steps.append(decode_s + _exchange_s(model, place, device, at_once))
        attended = (
            len(model.stages(parallelism.pp)[stage])
            * model.config.attended_numbers
            * prompt_tokens
            / 2
            / parallelism.tp
        )
        prompt_s = 2 * (products + attended) * prompt_tokens / (device.flop_per_s * share.prefill)
        floor_s = memory.weights_bytes / (device.bytes_per_s * share.decode)
        prompts.append(max(prompt_s, floor_s) + _exchange_s(model, place, device, prompt_tokens))
    token_s = sum(steps)
    return Speed(sum(prompts), token_s, batch / token_s, batch, share.source)


class RoutedCounts(NamedTuple):
    """Tokens that go to experts on other ranks, once to each of these, in all layers of a stage together."""

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
    joined_bytes: int  # of all ranks' parts, each as wide as the widest
    exchanges: int = 0
    exchanged_bytes: int = 0  # bytes that go to other ranks


def exchanged(
    model: PlannedModel, place: RankPlace, tokens: int, rows: int, routed: RoutedCounts | None = None
) -> ExchangedBytes:
    """Count the messages of a step with `tokens` tokens and `rows` rows of logits.

    If there are several copies of the attention, the counts are those of this rank's copy. Shared matrices need two sums in each layer; the first
    stage adds one after the embedding, and one join of the vocabulary. Copies need three exchanges in each layer of experts: the number of tokens for
    each rank, the tokens with their experts' numbers and weights, and the results. The first stage adds one exchange of the rows whose logits are
    wanted. `routed`: if None, the numbers expected when each expert is equally likely.
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
    """Return the expected number of tokens that a rank sends to other ranks, and receives.

    Every rank is assumed to have as many tokens.
    """
    ep, likely = place.parallelism.ep, 0.0
    for shape in _sparse_layers(model, place):
        elsewhere = shape.experts - shape.experts // ep  # than on one rank
        none = prod((elsewhere - i) / (shape.experts - i) for i in range(int(shape.active)))
        likely += (ep - 1) * (1 - none) * tokens
    return RoutedCounts(likely, likely)


def _sparse_layers(model: PlannedModel, place: RankPlace) -> list[WeightShape]:
    """Return one of the experts' matrices of each layer of the stage that has some."""
    layers = [model.layers[i] for i in model.stages(place.parallelism.pp)[place.stage]]
    found = [next((shape for shape in layer if shape.experts), None) for layer in layers]
    return [shape for shape in found if shape is not None]


def _products(model: PlannedModel, place: RankPlace) -> float:
    """Count one rank's products for one token.

    Experts count with the tokens of all ranks: on average as many arrive as leave.

    Experts on other ranks count with the tokens that come from there, which are as many as go there.
    """
    layers = model.stages(place.parallelism.pp)[place.stage]
    total = 0.0
    for layer, shape in model.weights():
        if layer in layers or (layer is None and shape.part == "head" and place.stage == 0):
            _, rows, columns = place.part_of(shape)
            total += rows * columns * shape.active if shape.part not in ("norms", "embedding") else 0
    return total


def _read_bytes(model: PlannedModel, place: RankPlace, memory: RankMemory, tokens: int) -> float:
    """Count the bytes of weights that a step of so many tokens reads.

    Of the experts it reads those of any token, if each expert is equally likely.
    """
    parts = dict(memory.weights)
    for unread in ("embedding", "vision"):
        tied = unread == "embedding" and "head" not in parts and place.stage == 0
        if not tied:
            parts.pop(unread, None)
    experts = float(parts.pop("experts", 0))
    shape = next((shape for _, shape in model.weights() if shape.experts), None)
    if shape is not None:
        experts *= shape.num_read(tokens) / shape.experts
    return sum(parts.values()) + experts


def _kv_bytes_of(memory: RankMemory, context_length: int) -> int:
    """Count the bytes of cache that one token of that context reads."""
    if memory.layout is None:
        return 0
    groups = CacheGroups(memory.layout.block_size, 1, memory.layout.windows)
    return groups.most_blocks(context_length, 1) * memory.layout.block_bytes


def _exchange_s(model: PlannedModel, place: RankPlace, device: Device, tokens: int) -> float:
    """Predict the time of a stage's collectives.

    These are two sums of hidden states a layer if ranks share matrices, tokens to their experts and back if experts are whole, and hidden states to
    the next stage.
    """
    tp, pp, ep, _ = place.parallelism
    each_s, row = _COLLECTIVE_S[device.is_cpu], model.config.hidden_size * model.item_bytes
    taken = 0.0
    if tp > 1:
        sums = exchanged(model, RankPlace(Parallelism(tp, pp), 0, place.stage), tokens, 0).sums
        taken += sums * (each_s + 2 * (tp - 1) / tp * row * tokens / device.link_bytes_per_s)
    if place.parallelism.copies > 1:  # where several ranks have a copy, each sends a part of its tokens
        routed = exchanged(model, RankPlace(Parallelism(1, pp, ep), 1, place.stage), -(-tokens // tp), 1)
        taken += routed.exchanges * each_s + routed.exchanged_bytes / device.link_bytes_per_s
    return taken + (pp > 1) * (each_s + row * tokens / device.link_bytes_per_s)
