"""A loader that serves a host's first model by its bootstrap program while the model is being loaded.

It wraps the loader that imports torch (engine/host/model_loader.py), and delays it until the first answer, since running both at once would slow
both. Knows files of programs and when to load; does not know how a host uses its models.
"""

import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import VERSION, HostConfig, HostReady, ModelFailed, ModelSpec
from pilotlight.engine.api.struct import replace
from pilotlight.engine.bootstrap import bootstrap_store
from pilotlight.engine.bootstrap.bootstrap_engine import BootstrapEngine
from pilotlight.engine.bootstrap.bootstrap_memory import ProgramMemory
from pilotlight.engine.bootstrap.bootstrap_runner import BootstrapRunner
from pilotlight.engine.bootstrap.program import BootstrapProgram, ProgramError, read
from pilotlight.engine.host.model_loader import Loader, ModelLoader
from pilotlight.engine.scheduling.plan import SchedulerLimits
from pilotlight.engine.weights.digests import check_sound, fingerprint
from pilotlight.kernels.cpu import functions
from pilotlight.kernels.cpu.build import BuildError
from pilotlight.kernels.cpu.mapped_file import opened
from pilotlight.kernels.torch_build import has_gpus

if TYPE_CHECKING:
    from pilotlight.engine.host.model_loader import LoadResult

log = logging.getLogger(__name__)

# How long the load of a model that has a program is delayed: until a model is requested, and until the first answer if a request waits for one.
_UNASKED_S = 0.5
_FIRST_ANSWER_S = 0.2
_SEQUENCES = 4  # of full length, for which there is memory
_GROUPS = 4  # row groups of the program in one step: the model may take over between two steps
_MARGIN = 16  # tokens: a sequence this close to the limit waits for the model
_SWITCH_S, _USUAL_SWITCH_S = 0.0005, sys.getswitchinterval()


def with_bootstrap(config: HostConfig, loader: ModelLoader) -> Loader:
    """Return the loader, wrapped if a host of this configuration may find programs to serve by."""
    is_on_cpu = config.device == "cpu" or (config.device == "auto" and not has_gpus())
    return BootstrapLoader(config, loader) if is_on_cpu and bootstrap_store.has_programs() else loader


class BootstrapModel:
    """A model served by its program."""

    def __init__(self, spec: ModelSpec, engine: BootstrapEngine, path: Path) -> None:
        self.spec = spec
        self.engine = engine
        self.path = path
        # A thread that imports torch meanwhile would hold Python's lock for 5 ms whenever a step ends.
        sys.setswitchinterval(_SWITCH_S)

    def close(self) -> None:
        sys.setswitchinterval(_USUAL_SWITCH_S)
        self.engine.close()


class BootstrapLoader:
    def __init__(self, config: HostConfig, loader: ModelLoader) -> None:
        self._config = config
        self._loader = loader
        self._begin_at = math.inf
        self._serving: BootstrapModel | None = None  # until the loader starts
        self._program: tuple[ModelSpec, Path] | None = None  # the program by which a model was served

    @property
    def ready(self) -> HostReady | None:
        return HostReady(VERSION) if self._program is not None else self._loader.ready

    @property
    def why_ending(self) -> str | None:
        return self._loader.why_ending

    def start(self) -> None:
        self._begin_at = time.monotonic() + _UNASKED_S

    def load(self, spec: ModelSpec) -> BootstrapModel | None:
        self._loader.load(spec)
        is_first = self._program is None and not self._loader.has_begun
        model = find_model(spec, self._config) if is_first else None
        if model is None:
            self._begin()
        else:
            self._serving, self._program = model, (spec, model.path)
            self._begin_at = time.monotonic() + (_FIRST_ANSWER_S if spec.is_awaited else 0.0)
        return model

    def prewarm(self, spec: ModelSpec) -> None:
        self._loader.prewarm(spec)

    def take_results(self) -> "list[tuple[ModelSpec, LoadResult]]":
        has_answered = self._serving is not None and self._serving.engine.has_answered
        if has_answered or time.monotonic() >= self._begin_at:
            self._begin()
        results = self._loader.take_results()
        for spec, result in results:
            if isinstance(result, ModelFailed) and self._program is not None and self._program[0] is spec:
                # The next host will not serve by it, and will report why the model cannot be loaded.
                log.error("%s, though its bootstrap program has served", result.message)
                self._program[1].unlink(missing_ok=True)
        return results

    def close(self) -> None:
        self._loader.close()

    def _begin(self) -> None:
        self._serving = None  # its mappings belong to its host and end with it
        self._begin_at = math.inf
        self._loader.start()


def find_model(spec: ModelSpec, config: HostConfig) -> BootstrapModel | None:
    """Return the model, served by the program of an earlier start; None if this host can use none."""
    began, directory, library = time.perf_counter(), Path(spec.path), bootstrap_store.library()
    if library is None or spec.kv_dtype != "auto":  # programs are recorded with the model's own dtype
        return None
    try:
        digest = fingerprint(directory).hex()
        path = bootstrap_store.path_of(digest, spec.dtype, library)
        if not path.exists():
            return None
        if (records := bootstrap_store.digests()) is not None:
            check_sound(directory, records)
        program, weights_at = _read(path)
        if (program.library, program.fingerprint) != (library.stem, digest):
            raise ProgramError("it is of another library or checkpoint")
        if program.host != (config.kv_bytes, config.block_size, spec.kv_tokens):
            return None
        memory = ProgramMemory(program, path, weights_at, directory, _SEQUENCES * program.max_blocks)
        threads = config.threads or len(os.sched_getaffinity(0))
        runner = BootstrapRunner(program, memory, functions.open_library(library), threads)
    except (BuildError, CheckpointError):
        return None
    except (OSError, ProgramError, AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        log.warning("the bootstrap program of %s is not used: %s", directory, error)
        return None
    bootstrap_store.note_use(path)
    return BootstrapModel(spec, _engine(spec, config, program, runner, began), path)


def _read(path: Path) -> tuple[BootstrapProgram, int]:
    """Return the program, and the offset of its weights in the file."""
    with opened(path) as fd:
        return read(fd)


def _engine(
    spec: ModelSpec, config: HostConfig, program: BootstrapProgram, runner: BootstrapRunner, began: float
) -> BootstrapEngine:
    total_blocks = max(program.max_blocks, min(program.info.total_blocks, _SEQUENCES * program.max_blocks))
    info = replace(program.info, name=spec.name, mapped=False, total_blocks=total_blocks)
    budget = min(config.max_num_batched_tokens, _GROUPS * program.rows)
    delay_s = config.max_decode_delay_ms / 1000
    limits = SchedulerLimits(config.block_size, budget, config.max_num_seqs, config.max_waiting, delay_s)
    room = program.max_blocks * config.block_size
    most_tokens = room - _MARGIN if room < info.context_length else info.context_length
    load_s = time.perf_counter() - began
    info = replace(info, load_s=load_s, load_phases=(("bootstrap", load_s),))
    return BootstrapEngine(info, runner, limits, most_tokens)
