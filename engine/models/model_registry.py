"""From `architectures` in config.json to the code that runs it."""

from collections.abc import Callable, Mapping
from typing import Any

from pilotlight.engine.description.config_registry import PARSERS, find_architecture
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families.latent import LatentConfig
from pilotlight.engine.models import bert, dense, gpt_oss, latent, llama4
from pilotlight.engine.models.model import Family, Model
from pilotlight.engine.weights.loader import WeightLoader


def _load_decoder(config: DenseConfig, loader: WeightLoader, context_length: int) -> Model:
    if isinstance(config, LatentConfig):
        return latent.load(config, loader, context_length)
    return dense.load(config, loader, context_length)


# The others are what their configs describe.
_LOADERS: dict[str, Callable[[Any, WeightLoader, int], Model]] = {
    "BertModel": bert.load,
    "GptOssForCausalLM": gpt_oss.load,
    "Llama4ForCausalLM": llama4.load,
    "Llama4ForConditionalGeneration": llama4.load,
    "RobertaModel": bert.load,
    "XLMRobertaModel": bert.load,
}
FAMILIES = {name: Family(parse, _LOADERS.get(name, _load_decoder)) for name, parse in PARSERS.items()}


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises CheckpointError."""
    return FAMILIES[find_architecture(config, FAMILIES)]
