"""The config of the plain decoder: Llama's, Mistral's and Qwen's, which differ in biases, head norms and windows alone."""

from dataclasses import dataclass

from pilotlight.engine.description.decoder_config import DecoderConfig
from pilotlight.engine.description.tensor_sizes import WeightShape, gated


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig(DecoderConfig):
    intermediate_size: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # queries and keys are normalised per head, before they are rotated

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        return [
            *self.attention_weights(name, qkv_bias=self.qkv_bias, o_bias=self.o_bias, qk_norm=self.qk_norm),
            *gated(f"{name}.mlp", self.hidden_size, self.intermediate_size, bias=self.mlp_bias),
        ]
