"""The decoder that all families share, or a pipeline stage of it: embedding, layers, norm, head.

This module computes the parts in order, whatever the family. A family provides its layers as a table and inherits the loop.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from pilotlight.engine.description.decoder_config import DecoderConfig
from pilotlight.engine.execution.context import Context, ImageRows
from pilotlight.engine.layers.embedding import ScoreHead, TokenEmbedding
from pilotlight.engine.layers.layer_inputs import LayerInputs
from pilotlight.engine.layers.norm import Norm, load_norm
from pilotlight.engine.layers.rotary import RotaryTable
from pilotlight.engine.layers.temperature import Temperature
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.shard import MatrixPart

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


# Prefixes of the names of a decoder's tensors: saved without its head, with its head, in Nemotron-H, in Qwen3-Omni, and, in two forms, with a vision
# tower.
_ROOTS = ("", "model.", "backbone.", "thinker.model.", "language_model.model.", "model.language_model.")


class Part(Protocol):
    """A part of a layer: a token mixer or a feed-forward."""

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Return [tokens, hidden] for x [tokens, hidden]."""


class Layer(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x and residual [tokens, hidden] after the layer; their sum is the hidden state.

        If `residual` is None, x is the hidden state.
        """


class VisionEncoder(Protocol):
    """A vision tower with its projections."""

    num_deep: int  # number of the decoder's first layers after which further embeddings of an image are added

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """Encode patches [rows, columns, numbers] of an image to the decoder's embeddings.

        Returns [tokens, (1 + num_deep) * hidden].
        """


class DraftHead(Protocol):
    """A drafting layer with its own input and output projections."""

    taps: Sequence[int]  # the model's layers whose hidden states it reads

    def features(self, hidden: torch.Tensor, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the features [tokens, hidden] that are kept from the model's hidden states.

        `hidden`: after its last layer; `tapped`: after the layers `taps`.
        """

    def embed(self, context: Context) -> torch.Tensor: ...

    def prepared(self, context: Context) -> Context:
        """Return the context with the batch's values that its layer needs."""

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, context: Context) -> torch.Tensor:
        """Return hidden states [tokens, hidden] from which the next token is guessed.

        For guessed tokens these hidden states also replace the features, which are not known yet. `before`: the features of the previous token.
        """

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        """Return fp32 logits [rows, vocab of the model] of [rows, hidden]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """A layer with norms before attention and feed-forward, after them, or both.

    It may lack one of the two parts. `residual_scale`: factor of the outputs of both. If `is_parallel`, both have the input of attention.
    `input_gate`: reads the layer's input besides hidden states.
    """

    attention_norm: Norm | None
    attention: Part | None
    attention_output_norm: Norm | None = None
    feed_forward_norm: Norm | None
    feed_forward: Part | None
    feed_forward_output_norm: Norm | None = None
    residual_scale: float = 1.0
    input_gate: Part | None = None
    is_parallel: bool = False
    scale: torch.Tensor | None = None  # [1], factor of the hidden states after the layer

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.is_parallel and self.attention is not None and self.feed_forward is not None:
            x, residual = _entered(self.attention_norm, x, residual)
            return self.attention(x, context) + self.feed_forward(x, context), residual
        if self.attention is not None:
            x, residual = _entered(self.attention_norm, x, residual)
            x = self._left(self.attention(x, context), self.attention_output_norm)
        if self.feed_forward is not None:
            x, residual = _entered(self.feed_forward_norm, x, residual)
            x = self._left(self.feed_forward(x, context), self.feed_forward_output_norm)
        assert residual is not None, "a layer has a part"
        if self.input_gate is not None:
            residual = x + residual
            x = self.input_gate(residual, context)
        return (x, residual) if self.scale is None else (x * self.scale, residual * self.scale)

    def _left(self, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is not None:
            x = norm(x)
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def _entered(norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the input of a part, and the sum to which its result is added."""
    if norm is not None:
        return norm.add(x, residual)
    summed = x if residual is None else x + residual
    return summed, summed


class LogitRule(NamedTuple):
    """A factor of logits, and a cap on them."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


PLAIN_LOGITS = LogitRule()


class Decoder:
    def __init__(
        self,
        embedding: TokenEmbedding | None,
        layers: Sequence[Layer],
        norm: Norm | None,
        head: TokenEmbedding | ScoreHead | None,
        rotary: list[RotaryTable],
        temperature: Temperature | None = None,
        projections: Sequence[MatrixPart] = (),
        logit_rule: LogitRule = PLAIN_LOGITS,
    ) -> None:
        """`projections`: projections that adapters may change, by index.

        Of several stages, only the first has embedding and head, and only the last has the norm.
        """
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.rotary = rotary
        self.temperature = temperature
        self.projections = projections
        self.logit_rule = logit_rule
        self.vision: VisionEncoder | None = None  # encodes images; None if the model takes none
        self.mtp: DraftHead | None = None  # an additional layer of the checkpoint, which drafts
        self.layer_inputs: LayerInputs | None = None  # computes inputs of layers besides hidden states

    def take_images(self, vision: VisionEncoder) -> None:
        """Accept images, which `vision` encodes. Its weights must be loaded after the decoder's."""
        self.vision = vision

    def draft_by(self, mtp: DraftHead) -> None:
        """Draft with an additional layer of the checkpoint. Its weights must be loaded after the decoder's."""
        self.mtp = mtp

    def feed_layers(self, inputs: LayerInputs) -> None:
        """Give layers inputs besides hidden states. Their weights must be loaded after the decoder's."""
        self.layer_inputs = inputs

    def score_by(self, head: ScoreHead) -> None:
        """Score classes instead of tokens. The rule for logits of tokens does not apply to classes."""
        self.head = head
        self.logit_rule = PLAIN_LOGITS

    def forward(self, context: Context) -> torch.Tensor:
        return self.tapped(context, ())[0]

    def tapped(self, context: Context, taps: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the result of `forward`, and the hidden states after the layers `taps`, in ascending order."""
        (x, context), residual = self.entered(context), None
        tapped, begin = [], 0
        for tap in taps:
            x, residual = self.run(range(begin, tap + 1), x, residual, context)
            tapped.append(x if residual is None else x + residual)
            begin = tap + 1
        x, residual = self.run(range(begin, len(self.layers)), x, residual, context)
        return self.finish(x, residual), tapped

    def entered(self, context: Context) -> tuple[torch.Tensor, Context]:
        """Return the hidden states before the first layer, and the context of all layers."""
        context = self.prepared(context)
        x = self.embed(context, context.incoming)
        return x, context if self.layer_inputs is None else replace(context, layer_inputs=self.layer_inputs(x, context))

    def prepared(self, context: Context) -> Context:
        """Return the context with the batch's values that all layers need."""
        positions = context.batch.positions
        turns = tuple([self._turns(table, context) for table in self.rotary])
        temperatures = self.temperature and self.temperature.at(positions)
        return replace(context, turns=turns, temperatures=temperatures)

    @staticmethod
    def _turns(table: RotaryTable, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos, sin [tokens, pairs] of the step's tokens."""
        cos, sin = table.at(context.batch.positions)
        if (images := context.images) is None or images.places is None or not table.is_by_place:
            return cos, sin
        placed = table.at_places(context.batch.positions[images.rows], images.places)
        return cos.index_copy(0, images.rows, placed[0]), sin.index_copy(0, images.rows, placed[1])

    def embed(self, context: Context, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states before the first layer.

        They are the embeddings of the batch's token ids and images, or `rows` [tokens, hidden].
        """
        if rows is not None:
            return rows
        assert self.embedding is not None, "a later stage is given hidden states"
        x = self.embedding(context.batch.token_ids, context)
        if context.images is None:
            return x
        return x.index_copy(0, context.images.rows, self._embeddings(context.images, 0))

    def _embeddings(self, images: ImageRows, number: int) -> torch.Tensor:
        """Return one of the sets of embeddings of the images, [tokens, hidden].

        Set 0 is the input of the model; set i is added to the output of layer i - 1.
        """
        assert self.vision is not None, "a model without a tower takes no images"
        assert images.embeddings is not None, "the first stage encodes images"
        return images.embeddings.chunk(1 + self.vision.num_deep, dim=1)[number]

    def run(
        self, layers: range, x: torch.Tensor, residual: torch.Tensor | None, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute consecutive layers in a prepared context. Arguments and results are those of a Layer."""
        num_deep = 0 if self.vision is None or context.images is None else self.vision.num_deep
        for i in layers:
            x, residual = self.layers[i](x, residual, context)
            if i < num_deep and context.images is not None:
                x = x.index_add(0, context.images.rows, self._embeddings(context.images, i + 1))
        return x, residual

    def finish(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states after the last layer, normalised unless another stage follows."""
        if self.norm is None:
            return x if residual is None else x + residual
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        assert self.head is not None, "the first stage has the head"
        return self.logit_rule(self.head.logits(hidden, ranks))


def tower_of(model: object) -> VisionEncoder | None:
    """Return a model's vision tower, or None if it has none."""
    return model.vision if isinstance(model, Decoder) else None


def root_of(loader: WeightLoader) -> str:
    """Return the prefix of the names of a decoder's tensors."""
    return next((root for root in _ROOTS if f"{root}embed_tokens.weight" in loader), "model.")


def load_decoder(
    config: DecoderConfig,
    loader: WeightLoader,
    context_length: int,
    load_layer: Callable[[int, str], Layer],
    embedding_scale: float = 1.0,
    temperature: Temperature | None = None,
    logit_rule: LogitRule = PLAIN_LOGITS,
) -> Decoder:
    """Load a decoder, or a stage of one.

    `load_layer(i, name)` makes the layer whose tensor names start with `name`.
    """
    root = root_of(loader)
    outer = root.removesuffix("model.") if root.endswith(".model.") else ""
    stage = loader.shard.stage_of(config.num_layers)
    embedding = head = norm = None
    if stage.is_first:
        embedding = head = TokenEmbedding.load(
            loader, f"{root}embed_tokens", config.vocab_size, config.hidden_size, embedding_scale
        )
    layers = [load_layer(i, f"{root}layers.{i}") for i in stage.layers]
    if stage.is_last:
        norm = load_norm(loader, f"{root}norm", config.hidden_size, config.norm)
    if config.tied:
        loader.skip(r"lm_head\.weight")  # a copy of the embedding
    elif stage.is_first:
        head = TokenEmbedding.load(loader, f"{outer}lm_head", config.vocab_size, config.hidden_size)
    for i in set(range(config.num_layers)) - set(stage.layers):
        loader.skip(rf"{re.escape(root)}layers\.{i}\..*")
    if stage.num_stages > 1:  # other stages load these parts
        loader.skip(rf"({re.escape(root)}(embed_tokens|norm)|{re.escape(outer)}lm_head)\..*")
    # old checkpoints store values that follow from config.json
    loader.skip(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    # scales of a quantized KV cache, which is not used here; shapes of packed matrices, which follow from config.json
    loader.skip(r".*\.([kv]_scale|weight_shape)")
    rotary = [
        RotaryTable(rule, dim, context_length, loader.device)
        for rule, dim in zip(config.rotary, config.rotary_dims, strict=True)
    ]
    for table in rotary:
        loader.compute(table.compute)
    projections = tuple(loader.projections or ()) if config.takes_adapters else ()
    return Decoder(embedding, layers, norm, head, rotary, temperature, projections, logit_rule)
