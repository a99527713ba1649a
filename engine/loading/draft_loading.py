"""Loads a drafter with weights: its configuration before the model's weights, its weights after them.

The configuration is needed first because the drafter's caches are in the model's blocks. A draft model is any decoder with the same vocabulary; an
EAGLE-3 head belongs to the model it was trained for; an MTP layer is in the model's own checkpoint. A drafter that does not fit is refused with the
reason. Ranks that share the model's matrices share its drafter's as well.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.core.phases import Phases
from pilotlight.engine.description.decoder_config import DecoderConfig
from pilotlight.engine.description.families import eagle3_config
from pilotlight.engine.description.sparse_config import SparseConfig
from pilotlight.engine.drafting.drafter_registry import DraftWords
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheSegment
from pilotlight.engine.loading.drafts import DraftTarget, LoadedDrafts, PlannedDrafts
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.models.draft_layers import DraftModel, FeatureDrafts
from pilotlight.engine.models.eagle3 import Eagle3Head
from pilotlight.engine.models.model import Family
from pilotlight.engine.planning.parallelism import Parallelism
from pilotlight.engine.weights.checkpoint import read_json
from pilotlight.engine.weights.config import architecture, read_config
from pilotlight.engine.weights.formats.weight_formats import read_format
from pilotlight.engine.weights.load import FilledModel, LayOut, WeightLoad
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.source import WeightSource


def read_words(words: str, layers: Sequence[CachedLayer]) -> DraftWords:
    """Return the drafters that the setting `speculate` names, for a model with the caches `layers`.

    Raises CheckpointError for a drafter with weights if there are states: its guesses would change them.
    """
    read = DraftWords.read(words)
    if read.model is not None and any(layer.is_state for layer in layers):
        raise CheckpointError(
            f"speculate: {read.model} drafts only for models without recurrent states, and this one has states; set it to suffix,grammar"
        )
    return read


def plan_drafts(
    words: DraftWords, config: Any, degrees: Parallelism, find_family: Callable[[Mapping[str, Any]], Family]
) -> PlannedDrafts | None:
    """Read the configuration of the drafter in `words`; return None if it has no weights.

    `config`: that of the model; `degrees`: how ranks share the model; `find_family`: finds a draft model's family. Raises CheckpointError.
    """
    if words.model is None:
        return None
    if degrees.pp > 1:
        raise CheckpointError(
            f"speculate: {words.model} does not draft for a model in {degrees.pp} stages; set it to suffix,grammar, or pp to 1"
        )
    if degrees.copies > 1:
        raise CheckpointError(
            f"speculate: {words.model} does not draft for ranks with separate sequences; set it to suffix,grammar, or dp to 1"
        )
    if not isinstance(config, DecoderConfig):
        raise CheckpointError(f"speculate: {words.model} drafts for models that generate, and this one does not")
    if words.model == "mtp":
        return PlannedMtp.of(config)
    assert words.directory is not None
    if not words.directory.is_dir():
        raise CheckpointError(
            f"speculate: {words.directory} is not a directory; a drafter is one with config.json and *.safetensors"
        )
    with named(words.directory):
        if words.model == "draft":
            return PlannedDraftModel.of(words.directory, config, find_family)
        return PlannedEagle3.of(words.directory, config)


@contextmanager
def named(directory: Path) -> Iterator[None]:
    """Open a context that adds the drafter's directory to the message of a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"speculate: the drafter in {directory}: {error}") from error


class PlannedDraftModel(NamedTuple):
    directory: Path
    raw_config: Mapping[str, Any]
    config: Any
    family: Family
    name: str = "draft"

    @classmethod
    def of(
        cls, directory: Path, model: DecoderConfig, find_family: Callable[[Mapping[str, Any]], Family]
    ) -> "PlannedDraftModel":
        raw = read_config(directory)
        family = find_family(raw)
        config = family.parse_config(raw)
        if config.vocab_size != model.vocab_size:
            raise CheckpointError(
                f"it has a vocabulary of {config.vocab_size} tokens, but the model has {model.vocab_size}"
            )
        if not config.cached_layers:
            raise CheckpointError(f"{architecture(raw)} generates nothing")
        if any(layer.is_state for layer in config.cached_layers):
            raise CheckpointError(f"{architecture(raw)} has a recurrent state, which cannot take back guessed tokens")
        return cls(directory, raw, config, family)

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        return tuple(self.config.cached_layers)

    def load(self, target: DraftTarget) -> LoadedDrafts:
        with named(self.directory):
            filled = _fill(
                self.directory,
                self.raw_config,
                self.config,
                target,
                lambda loader: self.family.load(self.config, loader, target.context_length),
            )
        return LoadedDrafts(self.name, DraftModel(filled.model, target.num_caches), _num_bytes(filled))


class PlannedEagle3(NamedTuple):
    directory: Path
    raw_config: Mapping[str, Any]
    config: eagle3_config.Eagle3Config
    name: str = "eagle3"

    @classmethod
    def of(cls, directory: Path, model: DecoderConfig) -> "PlannedEagle3":
        raw = read_json(directory, "config.json")
        return cls(
            directory, raw, eagle3_config.parse_config(raw, model.vocab_size, model.hidden_size, model.num_layers)
        )

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        return self.config.head_layers

    def load(self, target: DraftTarget) -> LoadedDrafts:
        model, first = target.model, target.num_caches
        assert isinstance(model, Decoder)

        def lay_out(loader: WeightLoader) -> Eagle3Head:
            return Eagle3Head.load(self.config, loader, model, first, target.context_length)

        with named(self.directory):
            filled = _fill(self.directory, self.raw_config, self.config, target, lay_out)
        return LoadedDrafts(self.name, FeatureDrafts(filled.model, first + 1), _num_bytes(filled))


class PlannedMtp(NamedTuple):
    config: SparseConfig
    name: str = "mtp"
    directory: Path | None = None

    @classmethod
    def of(cls, config: DecoderConfig) -> "PlannedMtp":
        if not isinstance(config, SparseConfig) or not config.num_mtp_layers:
            raise CheckpointError(
                "speculate: mtp drafts by a layer of the checkpoint that predicts further tokens, and config.json names none "
                "(num_nextn_predict_layers)"
            )
        return cls(replace(config, drafts_by_mtp=True))

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        return self.config.mtp_cached_layer, CachedLayer((CacheSegment("features", 1, self.config.hidden_size),))

    def load(self, target: DraftTarget) -> LoadedDrafts:
        assert isinstance(target.model, Decoder)
        assert target.model.mtp is not None, "the model was loaded by another config"
        return LoadedDrafts(self.name, FeatureDrafts(target.model.mtp, target.num_caches + 1), 0)


def _fill(
    directory: Path, raw_config: Mapping[str, Any], config: DecoderConfig, target: DraftTarget, lay_out: LayOut[Any]
) -> FilledModel[Any]:
    source = WeightSource(directory, architecture(raw_config), None, read_format(raw_config), config.fused)
    try:
        return WeightLoad(source, lay_out, target.dtype, target.device, Phases(), shard=target.shard).run()
    finally:
        source.close()


def _num_bytes(filled: FilledModel[Any]) -> int:
    return sum(tensor.nbytes for tensor in filled.tensors.values())
