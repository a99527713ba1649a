"""The decoder that all families share: embedding, layers around a residual, norm, head; whole or in pieces.

Knows the order of the parts; refuses to know which family they belong to. A family hands over its layers as a table
and inherits the loop.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from pilotlight.engine.description.decoder_config import DecoderConfig
from pilotlight.engine.execution.context import Context
from pilotlight.engine.execution.state_places import state_places
from pilotlight.engine.layers.embedding import ScoreHead, TokenEmbedding
from pilotlight.engine.layers.norm import RMSNorm
from pilotlight.engine.layers.rotary import RotaryTable
from pilotlight.engine.layers.temperature import Temperature
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.shard import MatrixPart

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


# Before the names of a decoder's tensors: saved without its head; with it; beside a vision tower.
_ROOTS = ("", "model.", "language_model.model.", "model.language_model.")


class Part(Protocol):
    """What mixes tokens, or feeds each forward."""

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]"""


class Layer(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [tokens, hidden], whose sum is the hidden states before the layer -> the same behind it. Without a residual x is the sum."""


class VisionEncoder(Protocol):
    """A tower with the projections behind it."""

    def encode(self, patches: torch.Tensor) -> torch.Tensor:
        """patches [rows, columns, numbers], a piece of an image -> embeddings [tokens, hidden] of the decoder"""


class DraftHead(Protocol):
    """A layer with its own way in and out."""

    taps: Sequence[int]  # the model's layers whose hidden states it is given

    def features(self, hidden: torch.Tensor, tapped: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what is kept of the model's hidden states [tokens, hidden], those behind its last layer and those behind the taps."""

    def embed(self, context: Context) -> torch.Tensor: ...

    def prepared(self, context: Context) -> Context:
        """Return the context with what its layer needs of the batch."""

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, context: Context) -> torch.Tensor:
        """Return hidden states [tokens, hidden] by which the next token is guessed, and which stand for the model's where those are not known.
        `before`: the features of the token before."""

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        """[rows, hidden] -> fp32 [rows, vocab of the model]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Norms stand before attention and feed-forward, behind them, or on both sides. `residual_scale`: of what the two add to the hidden states."""

    attention_norm: RMSNorm | None
    attention: Part
    attention_output_norm: RMSNorm | None = None
    feed_forward_norm: RMSNorm | None
    feed_forward: Part
    feed_forward_output_norm: RMSNorm | None = None
    residual_scale: float = 1.0
    scale: torch.Tensor | None = None  # [1], of the hidden states behind the layer

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = _entered(self.attention_norm, x, residual)
        x = self._left(self.attention(x, context), self.attention_output_norm)
        x, residual = _entered(self.feed_forward_norm, x, residual)
        x = self._left(self.feed_forward(x, context), self.feed_forward_output_norm)
        return (x, residual) if self.scale is None else (x * self.scale, residual * self.scale)

    def _left(self, x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        if norm is not None:
            x = norm(x)
        return x if self.residual_scale == 1.0 else x * self.residual_scale


def _entered(norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a part reads, and the sum that its result is added to."""
    if norm is not None:
        return norm.add(x, residual)
    summed = x if residual is None else x + residual
    return summed, summed


class LogitRule(NamedTuple):
    """A number that logits are multiplied with, and one that none of them exceeds."""

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
        norm: RMSNorm | None,
        head: TokenEmbedding | ScoreHead | None,
        rotary: list[RotaryTable],
        temperature: Temperature | None = None,
        projections: Sequence[MatrixPart] = (),
        logit_rule: LogitRule = PLAIN_LOGITS,
    ) -> None:
        """Of several stages the first alone has embedding and head, and the last the norm. `projections`: that adapters may change, by number."""
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.rotary = rotary
        self.temperature = temperature
        self.projections = projections
        self.logit_rule = logit_rule
        self.vision: VisionEncoder | None = None  # makes embeddings of images; None: it takes none
        self.mtp: DraftHead | None = None  # a further layer of the checkpoint, by which it drafts

    def take_images(self, vision: VisionEncoder) -> None:
        """Take embeddings of images, which this makes. Its weights lie behind the decoder's."""
        self.vision = vision

    def draft_by(self, mtp: DraftHead) -> None:
        """Draft by a further layer of the checkpoint. Its weights lie behind the decoder's."""
        self.mtp = mtp

    def score_by(self, head: ScoreHead) -> None:
        """Score classes in place of tokens, to which no rule of tokens' logits applies."""
        self.head = head
        self.logit_rule = PLAIN_LOGITS

    def forward(self, context: Context) -> torch.Tensor:
        return self.tapped(context, ())[0]

    def tapped(self, context: Context, taps: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return what `forward` returns, and the hidden states behind the layers `taps`, which rise."""
        context = self.prepared(context)
        x, residual = self.embed(context, context.incoming), None
        tapped, begin = [], 0
        for tap in taps:
            x, residual = self.run(range(begin, tap + 1), x, residual, context)
            tapped.append(x if residual is None else x + residual)
            begin = tap + 1
        x, residual = self.run(range(begin, len(self.layers)), x, residual, context)
        return self.finish(x, residual), tapped

    def prepared(self, context: Context) -> Context:
        """Return the context with what all layers need of the batch."""
        positions = context.batch.positions
        turns = tuple([table.at(positions) for table in self.rotary])
        temperatures = self.temperature and self.temperature.at(positions)
        return replace(context, turns=turns, temperatures=temperatures, states=state_places(context))

    def embed(self, context: Context, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the hidden states before the first layer: of the batch's token ids and images, or `rows` [tokens, hidden] in their place."""
        if rows is not None:
            return rows
        assert self.embedding is not None, "a later stage is given hidden states"
        x = self.embedding(context.batch.token_ids, context)
        if context.images is None:
            return x
        return x.index_copy(0, context.images.rows, context.images.embeddings)

    def run(
        self, layers: range, x: torch.Tensor, residual: torch.Tensor | None, context: Context
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute some layers, as Layer does, of a context that was prepared."""
        for i in layers:
            x, residual = self.layers[i](x, residual, context)
        return x, residual

    def finish(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden states behind the last layer, normalised unless another stage comes."""
        if self.norm is None:
            return x if residual is None else x + residual
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor, ranks: "Communicator | None" = None) -> torch.Tensor:
        assert self.head is not None, "the first stage has the head"
        return self.logit_rule(self.head.logits(hidden, ranks))


def root_of(loader: WeightLoader) -> str:
    """Return what the names of a decoder's tensors begin with."""
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
    """Load a decoder, or a stage of one. `load_layer(i, name)` makes the layer whose tensors begin with `name`."""
    root = root_of(loader)
    outer = "language_model." if root.startswith("language_model.") else ""
    stage = loader.shard.stage_of(config.num_layers)
    embedding = head = norm = None
    if stage.is_first:
        embedding = head = TokenEmbedding.load(
            loader, f"{root}embed_tokens", config.vocab_size, config.hidden_size, embedding_scale
        )
    layers = [load_layer(i, f"{root}layers.{i}") for i in stage.layers]
    if stage.is_last:
        norm = RMSNorm.load(loader, f"{root}norm", config.hidden_size, config.norm)
    if config.tied:
        loader.skip(r"lm_head\.weight")  # a copy of the embedding
    elif stage.is_first:
        head = TokenEmbedding.load(loader, f"{outer}lm_head", config.vocab_size, config.hidden_size)
    for i in set(range(config.num_layers)) - set(stage.layers):
        loader.skip(rf"{re.escape(root)}layers\.{i}\..*")
    if stage.num_stages > 1:  # other stages' parts
        loader.skip(rf"({re.escape(root)}(embed_tokens|norm)|{re.escape(outer)}lm_head)\..*")
    # old checkpoints store what config.json says
    loader.skip(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    # of a KV cache in fewer bits than ours; of packed matrices, what config.json says
    loader.skip(r".*\.([kv]_scale|weight_shape)")
    rotary = [
        RotaryTable(rule, dim, context_length, loader.device)
        for rule, dim in zip(config.rotary, config.rotary_dims, strict=True)
    ]
    for table in rotary:
        loader.compute(table.compute)
    projections = tuple(loader.projections or ())
    return Decoder(embedding, layers, norm, head, rotary, temperature, projections, logit_rule)
