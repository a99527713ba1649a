"""The table from an architecture in config.json to the code that runs it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.class_labels import SCORE, class_labels, scores_by_decoder
from pilotlight.engine.description.config_registry import PARSERS, find_architecture
from pilotlight.engine.layers.embedding import ScoreHead
from pilotlight.engine.models import dense, gpt_oss, llama4
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.models.encoders import bert, modernbert
from pilotlight.engine.models.model import Family, Model
from pilotlight.engine.weights.loader import WeightLoader

# Loaders of architectures that have separate code; the configs of all others describe them fully.
_LOADERS: dict[str, Callable[[Any, WeightLoader, int], Model]] = {
    "BertForSequenceClassification": bert.load,
    "BertModel": bert.load,
    "GptOssForCausalLM": gpt_oss.load,
    "Llama4ForCausalLM": llama4.load,
    "Llama4ForConditionalGeneration": llama4.load,
    "ModernBertForSequenceClassification": modernbert.load,
    "ModernBertModel": modernbert.load,
    "RobertaForSequenceClassification": bert.load,
    "RobertaModel": bert.load,
    "XLMRobertaForSequenceClassification": bert.load,
    "XLMRobertaModel": bert.load,
}
FAMILIES = {name: Family(parse, _LOADERS.get(name, dense.load)) for name, parse in PARSERS.items()}


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json. Raises CheckpointError."""
    name = find_architecture(config, FAMILIES)
    family = FAMILIES[name]
    if not scores_by_decoder(config, name):
        return family
    return family._replace(load=partial(_load_scoring, family.load, len(class_labels(config))))


def _load_scoring(
    load: Callable[[Any, WeightLoader, int], Model],
    num_classes: int,
    config: Any,
    loader: WeightLoader,
    context_length: int,
) -> Model:
    """Load a decoder with a head that scores classes. Raises CheckpointError."""
    model = load(config, loader, context_length)
    if not isinstance(model, Decoder):
        raise CheckpointError(f"{type(model).__name__} does not support a head that scores classes")
    if loader.shard.stage_of(config.num_layers).is_first:
        model.score_by(ScoreHead.load(loader, SCORE, num_classes, config.hidden_size))
    else:
        loader.skip(rf"{SCORE}\.weight")
    return model
