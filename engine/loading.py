"""From a ModelSpec to an engine that is ready to step: configuration, arithmetic, a place in the arena, weights, one
warm-up.

The first module on the way that imports torch; a host imports it in its loading thread, when the socket is already
bound.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine.adapters.bank import AdapterBank
from engine.adapters.residency import AdapterStore
from engine.adapters.store import RunnerAdapters
from engine.bootstrap.program import FileRange
from engine.bootstrap.recorder import BackgroundRecorder, TensorLayout, record
from engine.bootstrap.store import are_wanted
from engine.constraints import Grammars
from engine.description.decoder_config import architecture
from engine.description.image_sizes import ImageSizes, read_image_sizes
from engine.description.registry import ArchitectureConfig
from engine.draft_loading import DraftTarget, LoadedDrafts, PlannedDrafts, PlannedMtp, identity_of, plan_drafts
from engine.drafting.registry import DraftWords
from engine.dry_run import DryRun
from engine.engine import Engine
from engine.errors import CheckpointError, StepError
from engine.images.residency import ImageEncoder
from engine.kv.arena import Arena
from engine.kv.block_copier import BlockCopier, make_copier
from engine.kv.block_parts import BlockParts
from engine.kv.groups import Windows
from engine.kv.layout import CacheLayout, in_fp8
from engine.kv.lease import Lease
from engine.kv.place import find_place, num_reserved_blocks
from engine.kv.prefix_index import CacheIdentity
from engine.kv.shared_tiers import SharedTiers
from engine.kv_memory import KvMemory
from engine.loaded_model import LoadedModel, start_moving
from engine.models.decoder import Decoder
from engine.models.draft_layers import DraftLayers
from engine.models.registry import Family, Model, find_family
from engine.phases import Phases
from engine.plan import SchedulerLimits
from engine.planning.model import choose_dtype_name, plan_model
from engine.planning.parallelism import Parallelism
from engine.protocol import HostConfig, ModelInfo, ModelSpec
from engine.runner import ModelRunner
from engine.struct import replace
from engine.vision.store import RunnerImages
from engine.warm_up import BackgroundWarmUp
from engine.weights.bundle import CheckpointFacts
from engine.weights.config import eos_token_ids, read_config
from engine.weights.embedding_recipe import EmbeddingRecipe, read_recipe
from engine.weights.filling import ReadingProgress
from engine.weights.formats.registry import read_format
from engine.weights.kv_scales import read_kv_scales
from engine.weights.load import FilledModel, WeightLoad
from engine.weights.loader import WeightLoader
from engine.weights.shard import WHOLE, ExpertShard, Shard, Stage
from engine.weights.source import WeightSource
from engine.weights.storage import MetaStorage

if TYPE_CHECKING:
    from engine.parallel.communicator import Communicator, RankLinks
    from engine.parallel.ranks import RankGroup

_WARM_UP_TOKENS = 8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@torch.inference_mode()
def load_model(
    spec: ModelSpec,
    host: HostConfig,
    memory: KvMemory,
    on_progress: ReadingProgress | None = None,
    tiers: SharedTiers | None = None,
    records_bootstrap: bool = False,
) -> LoadedModel:
    """Load a model. `records_bootstrap`: leave a program by which a later host may open the model (engine/bootstrap)."""
    with opened_source(spec, host, memory.arena, memory.links, on_progress) as loading:
        if not loading.config.cached_layers:
            assert loading.recipe is not None, "only embedding models cache nothing"
            return loading.encoder()
        return loading.decoder(memory, tiers, records_bootstrap and memory.group is None)


@contextmanager
def opened_source(
    spec: ModelSpec,
    host: HostConfig,
    arena: Arena,
    links: "RankLinks | None",
    on_progress: ReadingProgress | None = None,
) -> "Iterator[ModelLoading]":
    """Open a load's scope: its configuration has been read, and its checkpoint is open. Raises CheckpointError."""
    phases = Phases()
    directory = Path(spec.path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; a model is a directory with config.json and *.safetensors")
    raw_config = read_config(directory)
    recipe = read_recipe(directory, raw_config)
    if recipe is not None:  # its logits are never asked for: a head of its own would only take memory
        raw_config["tie_word_embeddings"] = True
    family = find_family(raw_config)
    config = family.parse_config(raw_config)
    words = DraftWords.read(spec.speculate)
    drafts = None if recipe is not None else plan_drafts(words, config, Parallelism.of_host(host))
    if isinstance(drafts, PlannedMtp):
        config = drafts.config  # which has its layer loaded
    phases.end("config")
    # Of several ranks each has its own part, in its own memory.
    weights_file = None if spec.weights_file is None or links is not None else Path(spec.weights_file)
    source = WeightSource(directory, architecture(raw_config), weights_file, read_format(raw_config))
    try:
        if links is not None and source.packed is not None and config.cached_layers:
            raise CheckpointError(
                f"{directory} is packed, each tensor whole: ranks cannot share it; load the checkpoint that it was packed from"
            )
        yield ModelLoading(
            spec, host, arena, raw_config, family, config, recipe, source, phases, on_progress, links, drafts
        )
    except StepError as error:
        source.discard_shared()
        raise CheckpointError(str(error)) from error
    finally:
        source.close()


class ModelLoading(NamedTuple):
    """One load, on one rank, after its configuration has been read."""

    spec: ModelSpec
    host: HostConfig
    arena: Arena
    raw_config: dict[str, Any]
    family: Family
    config: ArchitectureConfig
    recipe: EmbeddingRecipe | None
    source: WeightSource
    phases: Phases
    on_progress: ReadingProgress | None
    links: "RankLinks | None"
    drafts: PlannedDrafts | None

    @property
    def shard(self) -> Shard:
        """What this rank has of every layer of its stage."""
        if self.links is None:
            return WHOLE
        stages, number = self.stages, self.links.stage
        stage = Stage(number, len(stages), stages[number]) if len(stages) > 1 else None
        degrees = Parallelism.of_host(self.host)
        experts = ExpertShard(self.links.rank, degrees.ep, degrees.spare) if degrees.ep > 1 else None
        return self.links.shard._replace(stage=stage, experts=experts)

    @property
    def stages(self) -> list[range]:
        """The layers of each stage, as even as the time of a decode step is."""
        num_stages = 1 if self.links is None else self.links.num_stages
        return plan_model(self.raw_config).stages(num_stages) if num_stages > 1 else [range(self.config.num_layers)]

    def layout(self) -> CacheLayout:
        """Return what a block holds on this rank. Raises CheckpointError where ranks cannot share the model."""
        config, links = self.config, self.links
        if links is None:
            return self._layouts(WHOLE)[0]
        degrees = Parallelism.of_host(self.host)
        num_experts = plan_model(self.raw_config).num_experts
        degrees.require_counts(config.num_layers, config.num_heads, config.num_kv_heads, num_experts)
        return self._layouts(links.shard)[links.stage]

    def block_parts(self) -> BlockParts:
        """Return what each rank of this group has of a block."""
        assert self.links is not None
        return BlockParts.of(self._layouts(WHOLE), self._layouts(self.links.shard), self.links.shard.size)

    def _layouts(self, shard: Shard) -> list[CacheLayout]:
        """Return what a block holds on a rank of each stage, if that has such a shard of it."""
        cached = tuple(self.config.cached_layers)
        if self.spec.kv_dtype == "fp8":
            cached = in_fp8(cached, torch.float8_e4m3fn, read_kv_scales(Path(self.spec.path)))
        drafted = () if self.drafts is None else self.drafts.cached_layers  # few, and as the model computes
        layers = [layer.part_of(shard) for layer in cached + drafted]
        sizes = (self.host.block_size, self._dtype(), self._longest())
        num_stages = 1 if self.links is None else self.links.num_stages
        stages = self.stages if num_stages > 1 else ()
        return [CacheLayout(layers, *sizes, stages, stage) for stage in range(num_stages)]

    def _arrangement(self, layout: CacheLayout, parts: BlockParts | None) -> str:
        """Return what the bytes of a block depend on behind the device, where it is whole if it can be."""
        if parts is None:
            return layout.identity
        return self._layouts(WHOLE)[0].identity if parts.is_whole else f"{layout.identity}:{len(parts.pieces)}"

    def decoder(self, memory: KvMemory, tiers: SharedTiers | None, records_bootstrap: bool) -> LoadedModel:
        spec, block_size, arena, group = self.spec, self.host.block_size, self.arena, memory.group
        dtype = self._dtype()
        self.phases.end("fingerprint")
        layout = self.layout()
        copies = 1 if group is None else group.copies
        place = find_place(spec, layout, memory.slabs, arena.total_bytes, copies)
        try:
            if isinstance(place, Lease):
                num_blocks, first_slab, num_seen = place.max_blocks // copies, 0, place.grid.capacity // copies
            else:
                num_blocks = num_seen = num_reserved_blocks(spec, layout)
                first_slab = place.slabs.start
            limits = self._limits(block_size, layout.windows)
            context_length = limits.groups.longest_context(num_blocks, self._longest())
            if context_length < 2:
                raise CheckpointError(
                    f"{spec.name} has room for {context_length} token: {layout.description}, and {num_blocks} are wholly its own; "
                    "raise kv_tokens or kv_gib"
                )
            self.phases.end("kv")
            if group is not None:
                group.load(spec, context_length, first_slab, num_seen)
            try:
                loaded = self.load(context_length, dtype, layout)
            except BaseException:
                if group is not None:
                    group.abandon(spec.name)
                raise
            model = loaded.model
            if group is not None:
                group.until_loaded(spec.name)
            if self._needs_warm_up(loaded):
                # Where nothing is compiled and the pages are there, one token proves as much as a longer prompt, in two thirds of the time.
                is_short = arena.device.type == "cpu" and (loaded.is_mapped or loaded.pending is not None)
                prompt = self._warm_up_prompt(1 if is_short else context_length - 1)
                if group is not None:
                    group.warm_up(spec.name, prompt, not is_short)
                self.warm_up(model, layout, prompt, with_decode=not is_short)
                self.phases.end("warm_up")
            drafts = self.load_drafts(model, context_length, dtype)
            own = self.runner_in(first_slab, num_seen, model, layout, drafts)
            runner = own if group is None else group.runner(own, spec.name)
            lease = place if isinstance(place, Lease) else None
            weights = self.source.fingerprint if tiers else b""
            info = self._info(context_length, dtype, loaded, block_size, copies * num_blocks // len(layout.groups))
            if drafts is not None:
                info = replace(info, weights_bytes=info.weights_bytes + drafts.num_bytes)
            parts = None if group is None else self.block_parts()
            arranged = (
                f"{self._arrangement(layout, parts)}:{arena.device.type}{identity_of(self.drafts) if tiers else ''}"
            )
            identity = CacheIdentity(spec.name, info.dtype, block_size, arranged, weights)
            copier: BlockCopier = make_copier(own.kv_cache)
            block_bytes = layout.block_bytes
            if group is not None and parts is not None:
                copier, block_bytes = group.copier(copier, spec.name, parts), parts.whole_bytes
            info = replace(info, kv_block_bytes=block_bytes, kv_windows=layout.windows)
            kept = tiers.cache_for(identity, copier, block_bytes) if tiers else None
            grammars = Grammars(Path(spec.path), self.config.vocab_size, info.eos_token_ids)
            adapters = self._adapters(own, group)
            drafter = None
            if drafts is not None:
                guessing = drafts.runner(layout, own.kv_cache, self.links and self.links.serving)
                drafter = drafts.drafter(guessing if group is None else group.drafting(guessing, spec.name), block_size)
            words = DraftWords.read(spec.speculate)
            speculation = words.speculator(self.config.vocab_size, runner.depth > 1, drafter)
            engine = Engine(
                info,
                runner,
                limits,
                lease,
                identity=identity,
                tiers=kept,
                speculation=speculation,
                grammars=grammars,
                adapters=adapters,
                images=self._images(own, group),
            )
            if records_bootstrap and drafts is None and arena.device.type == "cpu" and spec.kv_dtype == "auto":
                self._record_bootstrap(loaded, layout, info)
            return LoadedModel(spec, engine, place, start_moving(loaded, own), group)
        except BaseException:
            if group is not None:
                group.drop(spec.name)
            place.close()
            raise

    def runner_in(
        self, first_slab: int, num_blocks: int, model: Model, layout: CacheLayout, drafts: LoadedDrafts | None = None
    ) -> ModelRunner:
        """Return a runner of the model over its blocks of an arena."""
        blocks = layout.blocks_in(self.arena.span(first_slab, num_blocks * layout.block_bytes))
        return self._runner(
            model, layout, blocks, self.links and self.links.serving, self._bank(model), drafts and drafts.layers
        )

    def load_drafts(self, model: Model, context_length: int, dtype: torch.dtype) -> LoadedDrafts | None:
        """Load the drafter with weights, or this rank's part of it; None where there is none. Raises CheckpointError."""
        if self.drafts is None:
            return None
        shard = WHOLE if self.links is None else self.links.shard
        num_caches = len(self.config.cached_layers)
        return self.drafts.load(DraftTarget(model, num_caches, context_length, dtype, self.arena.device, shard))

    def warm_up(self, model: Model, layout: CacheLayout, prompt: Sequence[int], with_decode: bool) -> None:
        """Compute a short prompt, with all ranks, in a cache of its own: the arena's blocks may be at work for other models."""
        num_blocks = len(layout.groups) * -(-(len(prompt) + 1) // layout.block_size)
        own = layout.new_blocks(num_blocks, self.arena.device)
        self._runner(model, layout, own, self.links and self.links.loading).warm_up(prompt, with_decode=with_decode)

    def encoder(self) -> LoadedModel:
        """Load a model that caches nothing: to the scheduler, a block is a text at work, and there are as many as may run at once."""
        device = self.arena.device
        if self.spec.kv_dtype != "auto":
            raise CheckpointError(f"{self.spec.name} embeds texts and keeps no KV cache: leave kv_dtype at auto")
        dtype = self._dtype()
        self.phases.end("fingerprint")
        context_length, num_texts = self._longest(), self.host.max_num_seqs
        layout = CacheLayout((), context_length, dtype)
        first = self._replace(links=None)  # of several ranks: it computes the model alone
        loaded = first.load(context_length, dtype, layout)
        runner = self._runner(loaded.model, layout, layout.new_blocks(num_texts, device))
        if self._needs_warm_up(loaded):
            runner.warm_up(self._warm_up_prompt(context_length))
            self.phases.end("warm_up")
        info = self._info(context_length, dtype, loaded, context_length, num_texts)
        engine = Engine(info, runner, first._limits(context_length, whole_prompts=True))
        return LoadedModel(self.spec, engine, place=None, under_weights=start_moving(loaded, runner))

    def _record_bootstrap(self, loaded: FilledModel[Model], layout: CacheLayout, info: ModelInfo) -> None:
        """Record a bootstrap program for the model's next start, where it has none."""
        if not are_wanted():
            return
        parts = {
            name: tuple(FileRange(part.file.name, part.start, part.num_bytes) for part in found)
            for name, found in loaded.in_files.items()
        }
        laid, fingerprint = TensorLayout(loaded.tensors, parts), self.source.fingerprint.hex()
        model, spec, host = loaded.model, self.spec, self.host
        BackgroundRecorder(lambda: record(model, laid, layout, fingerprint, spec, host, info))

    def load(self, context_length: int, dtype: torch.dtype, layout: CacheLayout) -> FilledModel[Model]:
        """Load the weights, and compile kernels meanwhile."""
        device, source, recipe = self.arena.device, self.source, self.recipe

        def lay_out(loader: WeightLoader) -> Model:
            return self.family.load(self.config, loader, context_length)

        def dry_run() -> DryRun:
            storage, pooling = MetaStorage.open(Path(self.spec.path)), recipe and recipe.pooling
            return DryRun(
                self.family,
                self.config,
                storage,
                dtype,
                context_length,
                layout,
                pooling,
                source.format,
                source.stays_packed(device),
                self.shard,
            )

        warm_up = BackgroundWarmUp(self.spec.name, dry_run, device)
        loaded = WeightLoad(
            source, lay_out, dtype, device, self.phases, self.on_progress, self.shard, self.spec.lossless
        ).run()
        warm_up.wait()
        return loaded

    def _bank(self, model: Model) -> AdapterBank | None:
        """Return slots for adapters, which take no memory before the first one comes."""
        if not isinstance(model, Decoder) or not model.projections:
            return None
        return AdapterBank(
            model.projections, self._dtype(), self.arena.device, self.host.adapter_slots, self.shard.stage
        )

    def _adapters(self, runner: ModelRunner, group: "RankGroup | None") -> AdapterStore | None:
        if runner.adapters is None:
            return None
        own = RunnerAdapters(runner, runner.adapters, self.host.adapter_host_bytes)
        return own if group is None else group.adapters(own, self.spec.name)

    def _images(self, runner: ModelRunner, group: "RankGroup | None") -> ImageEncoder | None:
        sizes = self._image_sizes(runner.model)
        if sizes is None:
            return None
        own = RunnerImages(runner, sizes, self.config.hidden_size * self._dtype().itemsize)
        return own if group is None else group.images(own, self.spec.name)

    def _image_sizes(self, model: Model) -> ImageSizes | None:
        """Return the rule of a model's images; None: it takes none."""
        has_tower = isinstance(model, Decoder) and model.vision is not None
        return read_image_sizes(Path(self.spec.path)) if has_tower else None

    def _runner(
        self,
        model: Model,
        layout: CacheLayout,
        blocks: torch.Tensor,
        ranks: "Communicator | None" = None,
        adapters: AdapterBank | None = None,
        drafts: DraftLayers | None = None,
    ) -> ModelRunner:
        if self.recipe is None:
            hidden_size = self.config.hidden_size
            return ModelRunner(
                model, layout, blocks, ranks=ranks, adapters=adapters, hidden_size=hidden_size, drafts=drafts
            )
        recipe = self.recipe
        return ModelRunner(
            model, layout, blocks, recipe.pooling, recipe.is_normalized, ranks, hidden_size=self.config.hidden_size
        )

    def _longest(self) -> int:
        most = self.recipe.max_tokens if self.recipe is not None else None
        return self.config.context_length if most is None else min(most, self.config.context_length)

    def _dtype(self) -> torch.dtype:
        packed, wanted = self.source.packed_dtype, self.spec.dtype
        if packed is not None and wanted not in ("auto", _name(packed)):
            raise CheckpointError(
                f"{self.spec.path} was packed as {_name(packed)}; say dtype auto, or pack it again as {wanted}"
            )
        device = self.arena.device
        return packed or (choose_dtype(self.source.facts, device) if wanted == "auto" else _DTYPES[wanted])

    def _needs_warm_up(self, loaded: FilledModel[Model]) -> bool:
        """Whether to warm up. On a CPU a first request after it is no faster (0.6b: 80 ms with it and without, 3b: 330): it is there to prove that
        the model computes numbers, which what is woken has done before, and which a prompt that waits does as well, a tenth of a second sooner at
        3b."""
        return self.arena.device.type != "cpu" or not (loaded.is_proved or self.spec.is_awaited)

    def _warm_up_prompt(self, most_tokens: int) -> list[int]:
        # Not token 0: that is often a padding token whose embedding is zero, which would prove nothing.
        return [i % self.config.vocab_size for i in range(1, 1 + min(_WARM_UP_TOKENS, most_tokens))]

    def _info(
        self, context_length: int, dtype: torch.dtype, loaded: FilledModel[Model], block_size: int, total_blocks: int
    ) -> ModelInfo:
        recipe, is_encoder = self.recipe, not self.config.cached_layers
        sizes = self._image_sizes(loaded.model)
        return ModelInfo(
            name=self.spec.name,
            context_length=context_length,
            vocab_size=self.config.vocab_size,
            eos_token_ids=() if is_encoder else eos_token_ids(Path(self.spec.path), self.raw_config),
            dtype=_name(dtype),
            block_size=block_size,
            total_blocks=total_blocks,
            weights_bytes=sum(tensor.nbytes for tensor in loaded.tensors.values()),
            saved_bytes=loaded.saved_bytes,
            load_s=self.phases.total_s,
            pooling=recipe and recipe.pooling,
            image_token_id=sizes and sizes.placeholder,
            embedding_size=self.config.hidden_size if recipe else 0,
            mapped=loaded.is_mapped,
            load_phases=self.phases.spent,
        )

    def _limits(self, block_size: int, windows: Windows = (None,), whole_prompts: bool = False) -> SchedulerLimits:
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
            whole_prompts,
        )


def choose_dtype(facts: CheckpointFacts, device: torch.device) -> torch.dtype:
    return _DTYPES[choose_dtype_name(facts.num_parameters, frozenset(facts.dtypes), device.type == "cpu")]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
