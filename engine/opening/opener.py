"""Serves a model by its opening program until the model itself has been loaded.

An engine of its own, with blocks of its own, whose sequences the model's engine then takes over: their tokens so far are computed again. What the
program cannot do waits meanwhile. Knows which model it is for; refuses to know torch, and when the model itself is there (host.py).
"""

import logging
import os
import time
from pathlib import Path

from engine.engine import Engine
from engine.errors import CheckpointError
from engine.opening import kept
from engine.opening.choice import can_answer
from engine.opening.memory import Memory
from engine.opening.program import OpeningError, read
from engine.opening.runner import OpeningRunner
from engine.plan import Limits
from engine.protocol import HostConfig, ModelSpec, Submit, TokenOutput
from engine.sequence import Sequence
from engine.weights.digests import expect_sound
from engine.weights.fingerprint import fingerprint
from kernels.cpu import functions
from kernels.cpu.build import BuildError

log = logging.getLogger(__name__)

_SEQUENCES = 4  # of full length, for which there is room
_GROUPS = 4  # of the program's rows, in one step: between two steps the model may take over
# Weights of which the first step finds everything touched, in the time for which the host waits for its site; of more, they would meet each other.
_REHEARSED_BYTES = 64 << 20
_MARGIN = 16  # tokens: who comes so close to the longest sequence waits for the model


class Opener:
    """A program that was found, bound to this process's memory, before anybody has asked for its model."""

    def __init__(self, directory: Path, dtype: str, path: Path, library: Path, threads: int | None) -> None:
        """Raises OSError, OpeningError and AttributeError for a file or a library that cannot be used."""
        self.directory, self.dtype, self.path = directory, dtype, path
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            program, weights_at = read(fd)
        finally:
            os.close(fd)
        if program.library != library.stem:
            raise OpeningError("it is of another library")
        self.program = program
        num_blocks = _SEQUENCES * program.max_blocks
        memory = Memory(program, path, weights_at, directory, num_blocks)
        opened = functions.open_library(library)
        self._runner: OpeningRunner | None = OpeningRunner(
            program, memory, opened, threads or len(os.sched_getaffinity(0))
        )
        if sum(weight.num_bytes for weight in program.weights) <= _REHEARSED_BYTES:
            self._runner.rehearse()
        self._num_blocks = num_blocks
        kept.note_use(path)

    @classmethod
    def find(cls, directory: Path, dtype: str, threads: int | None) -> "Opener | None":
        """None: the model has left none, or it is of no use here; then the model is loaded as ever."""
        library = kept.library()
        if library is None:
            return None
        try:
            digest = fingerprint(directory).hex()
            path = kept.path_of(digest, dtype, library)
            if not path.exists():
                return None
            if (records := kept.digests()) is not None:
                expect_sound(directory, records)
            opener = cls(directory, dtype, path, library, threads)
            if opener.program.fingerprint != digest:
                raise OpeningError("it is of another checkpoint")
            return opener
        except (BuildError, CheckpointError):
            return None
        except (OSError, OpeningError, AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            log.warning("the opening program of %s is not used: %s", directory, error)
            return None

    def close(self) -> None:
        """Its memory is wanted for nothing more."""
        self._runner = None

    def open(self, spec: ModelSpec, config: HostConfig) -> "OpenedModel | None":
        """Once: the memory is the opened model's from then on. None: the program is of another model, or was made for a host of other sizes."""
        began, program, runner = time.perf_counter(), self.program, self._runner
        if runner is None or (Path(spec.path), spec.dtype) != (self.directory, self.dtype):
            return None
        if program.host != (config.kv_bytes, config.block_size, spec.kv_tokens):
            return None
        total_blocks = min(program.info.total_blocks, self._num_blocks)
        info = program.info._replace(name=spec.name, mapped=False, total_blocks=total_blocks)
        budget = min(config.max_num_batched_tokens, _GROUPS * program.rows)
        limits = Limits(config.block_size, budget, config.max_num_seqs, config.max_waiting)
        room = program.max_blocks * config.block_size
        most_tokens = room - _MARGIN if room < info.context_length else info.context_length
        self._runner = None
        engine = Engine(info, runner, limits, with_torch=False)
        load_s = time.perf_counter() - began
        engine.info = info._replace(load_s=load_s, load_phases=(("open", load_s),))
        return OpenedModel(spec, engine, most_tokens, self.path)


class OpenedModel:
    """Looks like a loaded model, as far as a host asks."""

    def __init__(self, spec: ModelSpec, engine: Engine, most_tokens: int, path: Path) -> None:
        self.spec = spec
        self.engine = engine
        self.path = path
        self._most_tokens = most_tokens
        self._held: dict[str, Submit] = {}  # not begun
        self._longest: list[Sequence] = []  # begun, and as long as they may be here

    @property
    def has_answered(self) -> bool:
        return self.engine.load().output_tokens > 0

    def has(self, sequence_id: str) -> bool:
        return sequence_id in self._held or any(s.sequence_id == sequence_id for s in self._longest)

    def submit(self, submit: Submit) -> None:
        """Now if the program can do it, else when the model is there."""
        longest = len(submit.prompt_token_ids) + submit.sampling.max_tokens
        if can_answer(submit) and (
            longest <= self._most_tokens or len(submit.prompt_token_ids) <= self._most_tokens // 2
        ):
            self.engine.submit(submit)
        else:
            self._held[submit.sequence_id] = submit

    def hold_longest(self) -> None:
        """Before a step: those for whose next tokens there is no room wait for the model."""
        self._longest += self.engine.detach_sequences(self._most_tokens + 1)

    def drop(self, sequence_id: str) -> bool:
        """One that waits for the model, and whose reader has left. False: there is none."""
        before = len(self._longest)
        self._longest = [sequence for sequence in self._longest if sequence.sequence_id != sequence_id]
        return self._held.pop(sequence_id, None) is not None or len(self._longest) < before

    def take_held(self) -> list[str]:
        """Ids of all that waits for the model, which is forgotten."""
        waiting = [*(sequence.sequence_id for sequence in self._longest), *self._held]
        self._longest, self._held = [], {}
        return waiting

    def hand_over_to(self, engine: Engine) -> list[TokenOutput]:
        """The model is here: all that is open goes on with its engine. What is left to be sent."""
        outputs = self.engine.take_outputs()
        engine.adopt_sequences([*self._longest, *self.engine.detach_sequences()])
        for submit in self._held.values():
            engine.submit(submit)
        return outputs

    def close(self) -> None:
        self.engine.close()
