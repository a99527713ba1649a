"""A load on one rank after its configuration was read: its share of model and cache, and its weights."""

import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pilotlight.engine.adapters.bank import AdapterBank
from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig, ModelInfo, ModelSpec
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.phases import Phases
from pilotlight.engine.description.config_registry import ArchitectureConfig
from pilotlight.engine.description.image_sizes import ImageSizes, read_image_sizes
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.execution.text_head import TextHead
from pilotlight.engine.kv.arena import Arena
from pilotlight.engine.kv.pool.block_parts import BlockParts
from pilotlight.engine.kv.pool.groups import Windows
from pilotlight.engine.kv.pool.layout import CacheLayout, in_fp8
from pilotlight.engine.loading.drafts import DraftTarget, LoadedDrafts, PlannedDrafts
from pilotlight.engine.loading.dry_run import DryRun
from pilotlight.engine.loading.warm_up import BackgroundWarmUp
from pilotlight.engine.models.decoder import Decoder, tower_of
from pilotlight.engine.models.model import DraftLayers, Family, Model
from pilotlight.engine.parallel.part_runner import PartRunner
from pilotlight.engine.planning.model_plan import choose_dtype_name, plan_model
from pilotlight.engine.planning.parallelism import Parallelism
from pilotlight.engine.scheduling.plan import SchedulerLimits
from pilotlight.engine.weights.bundles.bundle import CheckpointFacts
from pilotlight.engine.weights.bundles.bundle_maps import MAPS
from pilotlight.engine.weights.config import eos_token_ids
from pilotlight.engine.weights.filling import ReadingProgress
from pilotlight.engine.weights.formats.kv_scales import read_kv_scales
from pilotlight.engine.weights.load import FilledModel, WeightLoad
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.pooling_recipe import PoolingRecipe
from pilotlight.engine.weights.relocation import HugePages, Relocation
from pilotlight.engine.weights.shard import WHOLE, ExpertShard, Shard, Stage
from pilotlight.engine.weights.source import DTYPE_NAMES, WeightSource
from pilotlight.engine.weights.storage import MetaStorage
from pilotlight.engine.weights.weight_limits import WeightLimits
from pilotlight.kernels.dispatch import takes_triton

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator
    from pilotlight.engine.parallel.rank_links import RankLinks

_WARM_UP_TOKENS = 8
# Prompt tokens of a step before the model's speed is measured. A host is killed when a step exceeds its deadline, which follows from that speed; a
# busy or slow machine takes minutes for 2,048 tokens.
UNMEASURED_TOKENS = 256


class ModelLoading(NamedTuple):
    """One load, on one rank, after its configuration has been read."""

    spec: ModelSpec
    host: HostConfig
    arena: Arena
    raw_config: dict[str, Any]
    family: Family
    config: ArchitectureConfig
    recipe: PoolingRecipe | None
    source: WeightSource
    phases: Phases
    on_progress: ReadingProgress | None
    links: "RankLinks | None"
    drafts: PlannedDrafts | None
    weight_limits: WeightLimits

    @property
    def shard(self) -> Shard:
        """Return this rank's part of every layer of its stage."""
        if self.links is None:
            return WHOLE
        stages, number = self.stages, self.links.stage
        stage = Stage(number, len(stages), stages[number]) if len(stages) > 1 else None
        degrees = Parallelism.of_host(self.host)
        experts = ExpertShard(self.links.rank, degrees.ep, degrees.spare) if degrees.ep > 1 else None
        return self.links.shard._replace(stage=stage, experts=experts)

    @property
    def stages(self) -> list[range]:
        """Return the layers of each stage, which take equal shares of a decode step's time."""
        num_stages = 1 if self.links is None else self.links.num_stages
        return plan_model(self.raw_config).stages(num_stages) if num_stages > 1 else [range(self.config.num_layers)]

    def layout(self) -> CacheLayout:
        """Return the layout of a block on this rank. Raises CheckpointError if ranks cannot share the model."""
        config, links = self.config, self.links
        if links is None:
            return self._layouts(WHOLE)[0]
        degrees = Parallelism.of_host(self.host)
        num_experts = plan_model(self.raw_config).num_experts
        degrees.require_counts(config.num_layers, config.num_heads, config.num_kv_heads, num_experts)
        degrees.require_no_copies_of_states(config.cached_layers)
        return self._layouts(links.shard)[links.stage]

    def block_parts(self) -> BlockParts:
        """Return each rank's part of a block."""
        if self.links is None:
            return BlockParts.of_one(self.layout().block_bytes)
        return BlockParts.of(self._layouts(WHOLE), self._layouts(self.links.shard), self.links.shard.size)

    def _layouts(self, shard: Shard) -> list[CacheLayout]:
        """Return the layout of a block on a rank of each stage, for a given shard."""
        cached = tuple(self.config.cached_layers)
        if self.spec.kv_dtype == "fp8":
            cached = in_fp8(cached, torch.float8_e4m3fn, read_kv_scales(Path(self.spec.path)))
        drafted = (
            () if self.drafts is None else self.drafts.cached_layers
        )  # a drafter's small caches keep the model's dtype
        layers = [layer.part_of(shard) for layer in cached + drafted]
        sizes = (self.host.block_size, self.dtype(), self.longest_context())
        num_stages = 1 if self.links is None else self.links.num_stages
        caches = range(len(cached))  # those of several kinds of layers follow each other
        stages = [
            [i for i in caches if i % self.config.num_layers in stage] for stage in self.stages * (num_stages > 1)
        ]
        return [CacheLayout(layers, *sizes, stages, stage) for stage in range(num_stages)]

    def arrangement(self, layout: CacheLayout) -> str:
        """Return an identifier of the byte layout of a block in the tiers.

        Blocks there have the layout of a single rank if the ranks' parts can be combined to it.
        """
        parts = self.block_parts()
        return self._layouts(WHOLE)[0].identity if parts.is_whole else f"{layout.identity}:{len(parts.pieces)}"

    def runner_in(
        self, first_slab: int, num_blocks: int, model: Model, layout: CacheLayout, drafts: LoadedDrafts | None = None
    ) -> ModelRunner:
        """Return a runner of the model over its blocks of an arena."""
        blocks = layout.blocks_in(self.arena.span(first_slab, num_blocks * layout.block_bytes))
        return self.runner(
            model, layout, blocks, self.links and self.links.serving, self._bank(model), drafts and drafts.layers
        )

    def load_drafts(self, model: Model, context_length: int) -> LoadedDrafts | None:
        """Load the drafter with weights, or this rank's part of it; return None if there is none.

        Raises CheckpointError.
        """
        if self.drafts is None:
            return None
        shard = WHOLE if self.links is None else self.links.shard
        num_caches = len(self.config.cached_layers)
        return self.drafts.load(DraftTarget(model, num_caches, context_length, self.dtype(), self.arena.device, shard))

    def warm_up(self, model: Model, layout: CacheLayout, prompt: Sequence[int], with_decode: bool) -> None:
        """Compute a short prompt, with all ranks, in a separate cache: other models may use the arena."""
        num_blocks = len(layout.groups) * -(-(len(prompt) + 1) // layout.block_size)
        own = layout.new_blocks(num_blocks, self.arena.device)
        self.runner(model, layout, own, self.links and self.links.loading).warm_up(prompt, with_decode=with_decode)

    def prewarm(self) -> None:
        """Do those parts of a load that need no device memory: register shared weights, compile kernels."""
        encoders = CacheLayout((), self.longest_context(), self.dtype())
        layout = self.layout() if self.config.cached_layers else encoders
        if (shared := self.source.shared_file) is not None:
            MAPS.register(shared, self.arena.device)
        self._ready_kernels(self.longest_context(), layout).wait()

    def load(self, context_length: int, layout: CacheLayout) -> FilledModel[Model]:
        """Load the weights, and compile kernels meanwhile."""

        def lay_out(loader: WeightLoader) -> Model:
            return self.family.load(self.config, loader, context_length)

        warm_up = self._ready_kernels(context_length, layout)
        device, lossless = self.arena.device, self.spec.lossless
        loaded = WeightLoad(
            self.source,
            lay_out,
            layout.dtype,
            device,
            self.phases,
            self.on_progress,
            self.shard,
            lossless,
            self.weight_limits,
        ).run()
        warm_up.wait()
        return loaded

    def start_moving(self, loaded: FilledModel[Model], runner: ModelRunner) -> HugePages | Relocation[Model] | None:
        """Start moving the model's weights to memory that is read faster."""
        if isinstance(runner, PartRunner) and (loaded.pending is not None or loaded.in_files):
            runner.balancer.may_write = False
        if loaded.pending is not None:
            return Relocation(loaded.pending, runner.replace_model, self.weight_limits)
        return HugePages.start(loaded.memory, loaded.in_files, self.weight_limits)

    def _ready_kernels(self, context_length: int, layout: CacheLayout) -> BackgroundWarmUp:
        """Start to compile the model's kernels, unless this process has compiled them before."""
        source, device, recipe = self.source, self.arena.device, self.recipe

        def dry_run() -> DryRun:
            storage, pooling = MetaStorage.open(Path(self.spec.path), source.fused), recipe and recipe.pooling
            return DryRun(
                self.family,
                self.config,
                storage,
                layout.dtype,
                context_length,
                layout,
                pooling,
                source.format,
                source.stays_packed(device),
                self.shard,
                recipe is not None and recipe.classes is not None,
            )

        return BackgroundWarmUp(self.spec.name, dry_run, device, self._computation(layout), has_triton=takes_triton())

    def _bank(self, model: Model) -> AdapterBank | None:
        """Return slots for adapters, which take no memory until the first adapter is loaded."""
        if self.recipe is not None or not isinstance(model, Decoder) or not model.projections:
            return None
        return AdapterBank(
            model.projections, self.dtype(), self.arena.device, self.host.adapter_slots, self.shard.stage
        )

    def image_sizes(self, model: Model) -> ImageSizes | None:
        """Return the rule for sizes of the model's images, or None if it takes no images."""
        return None if tower_of(model) is None else read_image_sizes(Path(self.spec.path))

    def runner(
        self,
        model: Model,
        layout: CacheLayout,
        blocks: torch.Tensor,
        ranks: "Communicator | None" = None,
        adapters: AdapterBank | None = None,
        drafts: DraftLayers | None = None,
    ) -> ModelRunner:
        hidden = self.config.hidden_size
        head = None if self.recipe is None else TextHead(self.recipe, hidden, self.arena.device)
        if ranks is None:
            return ModelRunner(model, layout, blocks, head, adapters, drafts)
        return PartRunner(model, layout, blocks, ranks, hidden, head, adapters, drafts)

    def longest_context(self) -> int:
        most = self.recipe.max_tokens if self.recipe is not None else None
        return self.config.context_length if most is None else min(most, self.config.context_length)

    def dtype(self) -> torch.dtype:
        packed, wanted = self.source.packed_dtype, self.spec.dtype
        if packed is not None and wanted not in ("auto", _name(packed)):
            raise CheckpointError(
                f"{self.spec.path} was packed as {_name(packed)}; set dtype to auto, or pack it again as {wanted}"
            )
        device = self.arena.device
        return packed or (choose_dtype(self.source.facts, device) if wanted == "auto" else DTYPE_NAMES[wanted])

    def needs_warm_up(self, loaded: FilledModel[Model]) -> bool:
        """True if a warm-up is needed.

        On a CPU it does not make the first request faster (0.6b: 80 ms either way, 3b: 330): it only checks that results are finite. A woken model
        was checked before, and a waiting prompt checks it as well, a tenth of a second sooner for 3b. On a GPU, libraries load their code at first
        use, about 70 ms on an H100; only a checked model with a waiting prompt needs no warm-up.
        """
        if self.arena.device.type != "cpu":
            return not (loaded.is_proved and self.spec.is_awaited)
        return not (loaded.is_proved or self.spec.is_awaited)

    def _computation(self, layout: CacheLayout) -> Hashable | None:
        """Return an identifier of this load's kernels; None if the weights are not in shared memory."""
        if self.source.shared_path is None:
            return None
        spec = replace(self.spec, name="", is_awaited=False, kv_tokens=None)
        return spec, self.source.fingerprint, layout.identity, str(self.arena.device)

    def warm_up_prompt(self, most_tokens: int) -> list[int]:
        # Not token 0: that is often a padding token whose embedding is zero, which would test nothing.
        return [i % self.config.vocab_size for i in range(1, 1 + min(_WARM_UP_TOKENS, most_tokens))]

    def info(self, context_length: int, loaded: FilledModel[Model], block_size: int, total_blocks: int) -> ModelInfo:
        recipe, is_encoder = self.recipe, not self.config.cached_layers
        sizes = self.image_sizes(loaded.model)
        return ModelInfo(
            name=self.spec.name,
            context_length=context_length,
            vocab_size=self.config.vocab_size,
            eos_token_ids=()
            if is_encoder
            else eos_token_ids(Path(self.spec.path), self.raw_config, self.config.vocab_size),
            dtype=_name(self.dtype()),
            stored_dtypes=self.source.facts.dtypes,
            block_size=block_size,
            total_blocks=total_blocks,
            weights_bytes=sum(tensor.nbytes for tensor in loaded.tensors.values()),
            saved_bytes=loaded.saved_bytes,
            load_s=self.phases.total_s,
            pooling=recipe and recipe.pooling,
            text_prompt=recipe.prompt if recipe else "",
            prompts=recipe.prompts if recipe else (),
            labels=recipe.classes.labels if recipe and recipe.classes else (),
            activation=recipe.classes.activation if recipe and recipe.classes else "none",
            answers_by_token=recipe is not None and recipe.keeps_head,
            image_token_id=sizes and sizes.placeholder,
            embedding_size=recipe.vector_size(self.config.hidden_size) if recipe else 0,
            mapped=loaded.is_mapped,
            load_phases=self.phases.spent,
        )

    def limits(
        self, block_size: int, windows: Windows = (None,), *, has_states: bool = False, whole_prompts: bool = False
    ) -> SchedulerLimits:
        host = self.host
        return SchedulerLimits(
            block_size,
            host.max_num_batched_tokens,
            host.max_num_seqs,
            host.max_waiting,
            host.max_decode_delay_ms / 1000,
            windows,
            host.stages,
            1 if self.links is None else Parallelism.of_host(host).copies,
            has_states,
            whole_prompts,
            math.inf if whole_prompts else UNMEASURED_TOKENS,
            self.config.image_needs(self.dtype().itemsize).step_tokens,
            # Other devices' products have other bits for other numbers of rows; states of replayed tokens would have to be kept.
            replays=self.arena.device.type == "cpu" and not has_states,
        )


def choose_dtype(facts: CheckpointFacts, device: torch.device) -> torch.dtype:
    return DTYPE_NAMES[choose_dtype_name(facts.num_parameters, frozenset(facts.dtypes), device.type == "cpu")]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
