"""The path from a ModelSpec to an engine that is ready to step.

Its steps are configuration, sizes, a place in the arena, weights, and a warm-up. It imports torch, so a host imports this module in its loading
thread, when the socket is already bound.
"""

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.kv.shared_tiers import SharedTiers
from pilotlight.engine.loading.decoder_loading import load_decoder
from pilotlight.engine.loading.kv_memory import KvMemory
from pilotlight.engine.loading.loaded_model import LoadedModel
from pilotlight.engine.loading.model_loading import ModelLoading
from pilotlight.engine.loading.opened_source import opened_source
from pilotlight.engine.weights.filling import ReadingProgress
from pilotlight.engine.weights.weight_limits import USUAL_LIMITS, WeightLimits


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
        return load_decoder(loading, memory, tiers)


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
