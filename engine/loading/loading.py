"""The path from a ModelSpec to an engine that is ready to step.

Its steps are configuration, sizes, a place in the arena, weights on every rank, and a warm-up. If the load of a decoder fails, its place and the
other ranks' parts are released. This module imports torch, so a host imports it in its loading thread, when the socket is already bound.
"""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from pilotlight.engine.adapters.adapter_residency import AdapterStore
from pilotlight.engine.adapters.adapter_store import RunnerAdapters
from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig, ModelInfo, ModelSpec
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.drafting.model_drafter import ModelDrafter
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.grammar.constraints import Grammars
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler
from pilotlight.engine.images.image_residency import ImageEncoder
from pilotlight.engine.kv.lending.lease import Lease, Reservation
from pilotlight.engine.kv.lending.slab_allocator import find_place, num_reserved_blocks
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.kv.pool.prefix_index import CacheIdentity
from pilotlight.engine.kv.shared_tiers import SharedTiers
from pilotlight.engine.kv.tier_protocol import Tiers
from pilotlight.engine.kv.transfer.block_copier import make_copier
from pilotlight.engine.loading.draft_loading import read_words
from pilotlight.engine.loading.drafts import LoadedDrafts, identity_of
from pilotlight.engine.loading.kv_memory import KvMemory
from pilotlight.engine.loading.loaded_model import LoadedModel
from pilotlight.engine.loading.model_loading import ModelLoading
from pilotlight.engine.loading.opened_source import opened_source
from pilotlight.engine.models.decoder import tower_of
from pilotlight.engine.models.model import Model
from pilotlight.engine.parallel.one_rank import OneRank
from pilotlight.engine.vision.picture_store import RunnerImages
from pilotlight.engine.weights.filling import ReadingProgress
from pilotlight.engine.weights.load import FilledModel
from pilotlight.engine.weights.weight_limits import USUAL_LIMITS, WeightLimits

if TYPE_CHECKING:
    from pilotlight.engine.parallel.ranks import RankGroup


@torch.inference_mode()
def load_model(
    spec: ModelSpec,
    host: HostConfig,
    memory: KvMemory,
    on_progress: ReadingProgress | None = None,
    tiers: SharedTiers | None = None,
    limits: WeightLimits = USUAL_LIMITS,
) -> LoadedModel:
    """Load a model. Raises CheckpointError."""
    with opened_source(spec, host, memory.arena, memory.links, on_progress, limits) as loading:
        if not loading.config.cached_layers:
            if loading.recipe is None:
                raise CheckpointError(
                    f"{spec.path} is an encoder, which cannot generate text, and the directory does not describe how to make "
                    "embeddings with it: sentence-transformers' modules.json and 1_Pooling/config.json are missing"
                )
            return _load_encoder(loading)
        return _load_decoder(loading, memory, tiers)


def _load_encoder(loading: ModelLoading) -> LoadedModel:
    """Load a model without a KV cache. For the scheduler, each block is one running text."""
    if loading.spec.kv_dtype != "auto":
        raise CheckpointError(f"{loading.spec.name} is an encoder and keeps no KV cache: leave kv_dtype at auto")
    loading = loading._replace(links=None)  # only the first of several ranks computes an encoder
    context_length, num_texts = loading.longest_context(), loading.host.max_num_seqs
    layout = CacheLayout((), context_length, loading.dtype())
    loading.phases.end("fingerprint")
    loaded = loading.load(context_length, layout)
    runner = loading.runner(loaded.model, layout, layout.new_blocks(num_texts, loading.arena.device))
    if loading.needs_warm_up(loaded):
        runner.warm_up(loading.warm_up_prompt(context_length))
        loading.phases.end("warm_up")
    info = loading.info(context_length, loaded, context_length, num_texts)
    engine = Engine(info, runner, loading.limits(context_length, whole_prompts=True))
    return LoadedModel(loading.spec, engine, place=None, under_weights=loading.start_moving(loaded, runner))


def _load_decoder(loading: ModelLoading, memory: KvMemory, tiers: SharedTiers | None) -> LoadedModel:
    """Load a model with a KV cache. Raises CheckpointError."""
    spec, group = loading.spec, memory.group
    layout = loading.layout()
    loading.phases.end("fingerprint")
    place = find_place(spec, layout, memory.slabs, memory.arena.total_bytes, group.copies)
    try:
        return _PlacedDecoder(loading, group, layout, place).load(tiers)
    except BaseException:
        group.drop(spec.name)
        place.close()
        raise


class _PlacedDecoder(NamedTuple):
    """A load whose cache has a place in the arena."""

    loading: ModelLoading
    group: "RankGroup | OneRank"
    layout: CacheLayout
    place: Lease | Reservation

    def load(self, tiers: SharedTiers | None) -> LoadedModel:
        loading, group, spec = self.loading, self.group, self.loading.spec
        context_length = self._context_length()
        loading.phases.end("kv")
        weights = self._weights(context_length)
        self._warm_up(weights, context_length)
        drafts = loading.load_drafts(weights.model, context_length)
        own = loading.runner_in(self._first_slab, self._num_blocks_seen, weights.model, self.layout, drafts)
        runner = group.runner(own, spec.name)
        info = self._info(context_length, weights, drafts)
        identity = self._identity(info, own, tiers)
        drafter = None if drafts is None else self._drafter(drafts, own)
        words = read_words(spec.speculate, loading.config.cached_layers)
        engine = Engine(
            info,
            runner,
            loading.limits(self.layout.block_size, self.layout.windows, has_states=self.layout.has_states),
            self.place if isinstance(self.place, Lease) else None,
            identity=identity,
            tiers=self._tiers(own, info, identity, tiers),
            speculation=words.speculator(info.vocab_size, runner.depth > 1, drafter),
            grammars=Grammars(GrammarCompiler(Path(spec.path), info.vocab_size, info.eos_token_ids)),
            adapters=self._adapters(own),
            images=self._images(own),
        )
        return LoadedModel(spec, engine, self.place, loading.start_moving(weights, own), group)

    @property
    def _num_blocks(self) -> int:
        """Return the largest number of blocks that sequences of one rank can have."""
        if isinstance(self.place, Lease):
            return self.place.max_blocks // self.group.copies
        return num_reserved_blocks(self.loading.spec, self.layout)

    @property
    def _num_blocks_seen(self) -> int:
        """Return the end of the block numbers that a runner may get: with a lease, all of the arena's."""
        return self.place.grid.capacity // self.group.copies if isinstance(self.place, Lease) else self._num_blocks

    @property
    def _first_slab(self) -> int:
        return 0 if isinstance(self.place, Lease) else self.place.slabs.start

    def _context_length(self) -> int:
        loading, layout = self.loading, self.layout
        groups = loading.limits(layout.block_size, layout.windows).groups
        context_length = groups.longest_context(self._num_blocks, loading.longest_context())
        if context_length < 2:
            raise CheckpointError(
                f"{loading.spec.name} has room for only {context_length} token, with {self._num_blocks} blocks ({layout.description}); "
                "raise kv_tokens or kv_gib"
            )
        return context_length

    def _weights(self, context_length: int) -> FilledModel[Model]:
        """Load this rank's part of the weights while the other ranks load their parts."""
        group, name = self.group, self.loading.spec.name
        group.load(self.loading.spec, context_length, self._first_slab, self._num_blocks_seen)
        try:
            loaded = self.loading.load(context_length, self.layout)
        except BaseException:
            group.abandon(name)
            raise
        group.until_loaded(name)
        return loaded

    def _warm_up(self, weights: FilledModel[Model], context_length: int) -> None:
        loading = self.loading
        if not loading.needs_warm_up(weights):
            return
        # On a CPU with weights in memory, one token tests as much as a longer prompt, in two thirds of the time.
        is_short = loading.arena.device.type == "cpu" and (weights.is_mapped or weights.pending is not None)
        prompt = loading.warm_up_prompt(1 if is_short else context_length - 1)
        self.group.warm_up(loading.spec.name, prompt, not is_short)
        loading.warm_up(weights.model, self.layout, prompt, with_decode=not is_short)
        loading.phases.end("warm_up")

    def _info(self, context_length: int, weights: FilledModel[Model], drafts: LoadedDrafts | None) -> ModelInfo:
        layout = self.layout
        num_blocks = self.group.copies * self._num_blocks // len(layout.groups)
        info = self.loading.info(context_length, weights, layout.block_size, num_blocks)
        return replace(
            info,
            weights_bytes=info.weights_bytes + (0 if drafts is None else drafts.num_bytes),
            kv_block_bytes=self.loading.block_parts().whole_bytes,
        )

    def _drafter(self, drafts: LoadedDrafts, own: ModelRunner) -> ModelDrafter:
        links, name = self.loading.links, self.loading.spec.name
        guessing = self.loading.runner(drafts.layers, self.layout, own.kv_cache, links and links.serving)
        return drafts.drafter(self.group.drafting(guessing, name), self.layout.block_size)

    def _identity(self, info: ModelInfo, own: ModelRunner, tiers: SharedTiers | None) -> CacheIdentity:
        """Return the identity of cached blocks, without fingerprints if they never leave this device."""
        loading = self.loading
        weights, drafts = (loading.source.fingerprint, identity_of(loading.drafts)) if tiers else (b"", "")
        arranged = f"{loading.arrangement(self.layout)}:{loading.arena.device.type}{drafts}"
        if tiers and (images := loading.image_sizes(own.model)):  # settings outside the weights' fingerprint
            arranged += f":{images}"
        return CacheIdentity(info.name, info.dtype, info.block_size, arranged, weights)

    def _tiers(
        self, own: ModelRunner, info: ModelInfo, identity: CacheIdentity, tiers: SharedTiers | None
    ) -> Tiers | None:
        if not tiers:
            return None
        alone = make_copier(own.kv_cache, tiers.memory_for(info.kv_block_bytes))
        copier = self.group.copier(alone, info.name, self.loading.block_parts())
        return tiers.cache_for(identity, copier, info.kv_block_bytes)

    def _adapters(self, own: ModelRunner) -> AdapterStore | None:
        if own.adapters is None:
            return None
        host_bytes = self.loading.host.adapter_host_bytes
        return RunnerAdapters(own, own.adapters, host_bytes, self.loading.spec.name, self.group.send)

    def _images(self, own: ModelRunner) -> ImageEncoder | None:
        tower, sizes = tower_of(own.model), self.loading.image_sizes(own.model)
        if tower is None or sizes is None:
            return None
        token_bytes = (1 + tower.num_deep) * self.loading.config.hidden_size * self.layout.dtype.itemsize
        return RunnerImages(own, sizes, token_bytes, self.loading.spec.name, self.group.send)
