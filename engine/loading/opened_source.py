"""The beginning of a load: its configuration is read, and its checkpoint opened."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.engine.api.errors import CheckpointError, StepError
from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.core.phases import Phases
from pilotlight.engine.description.decoder_config import DecoderConfig
from pilotlight.engine.kv.arena import Arena
from pilotlight.engine.loading.draft_loading import PlannedMtp, plan_drafts, read_words
from pilotlight.engine.loading.model_loading import ModelLoading
from pilotlight.engine.models.model_registry import find_family
from pilotlight.engine.planning.parallelism import Parallelism
from pilotlight.engine.weights.config import architecture
from pilotlight.engine.weights.filling import ReadingProgress
from pilotlight.engine.weights.formats.weight_formats import read_format
from pilotlight.engine.weights.pooling_recipe import read_model_config
from pilotlight.engine.weights.source import WeightSource
from pilotlight.engine.weights.weight_limits import USUAL_LIMITS, WeightLimits

if TYPE_CHECKING:
    from pilotlight.engine.parallel.rank_links import RankLinks


@contextmanager
def opened_source(
    spec: ModelSpec,
    host: HostConfig,
    arena: Arena,
    links: "RankLinks | None",
    on_progress: ReadingProgress | None = None,
    limits: WeightLimits = USUAL_LIMITS,
) -> Iterator[ModelLoading]:
    """Open a load: read its configuration, and open its checkpoint. Raises CheckpointError."""
    phases = Phases()
    directory = Path(spec.path)
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not a directory; a model is a directory with config.json and *.safetensors"
        )
    raw_config, recipe = read_model_config(directory)
    family = find_family(raw_config)
    config = family.parse_config(raw_config)
    words = read_words(spec.speculate, config.cached_layers)
    drafts = None if recipe is not None else plan_drafts(words, config, Parallelism.of_host(host), find_family)
    if isinstance(drafts, PlannedMtp):
        config = drafts.config  # a config with which the model's load includes the layer that drafts
    phases.end("config")
    # Several ranks do not map the file: each has only its part of the weights, in its own memory.
    weights_file = None if spec.weights_file is None or links is not None else Path(spec.weights_file)
    fused = config.fused if isinstance(config, DecoderConfig) else ()
    source = WeightSource(directory, architecture(raw_config), weights_file, read_format(raw_config), fused)
    try:
        if links is not None and source.packed is not None and config.cached_layers:
            raise CheckpointError(
                f"{directory} is packed, so ranks cannot share its tensors; load the checkpoint that it was packed from"
            )
        yield ModelLoading(
            spec, host, arena, raw_config, family, config, recipe, source, phases, on_progress, links, drafts, limits
        )
    except StepError as error:
        source.discard_shared()
        raise CheckpointError(str(error)) from error
    finally:
        source.close()
