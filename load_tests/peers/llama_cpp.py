"""Speed of llama.cpp's decode steps, for comparison with ours.

llama.cpp's own benchmark decodes one sequence with the peers' checkpoint, which `make peers` writes as one GGUF file per type.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from load_tests.engine_speed import DECODE_CONTEXT
from load_tests.scenarios.engines import LlamaCpp, Task

_SHAPE, _TOKENS = "0.5b", 16  # the shape of load_tests/peers/checkpoint.py, and decoded tokens
_FILES = {"bf16": "model", "q8_0": "Q8_0", "q4_K_M": "Q4_K_M"}

Look = Callable[[], float]  # returns seconds of a step


class LlamaFiles(NamedTuple):
    """The GGUF files by type, and the benchmark program that reads them."""

    files: dict[str, Path]
    program: Path
    threads: int

    @classmethod
    def find(cls, folder: Path, shape: str, threads: int, types: Sequence[str]) -> "LlamaFiles | None":
        """Return the files and the program; None if `make peers` has not installed all that the shape needs."""
        program = next(iter(folder.glob("llama/*/vendor/llama.cpp/build/bin/llama-batched-bench")), None)
        files = {name: folder / "checkpoint" / f"{_FILES[name]}.gguf" for name in types}
        if shape != _SHAPE or program is None or not all(file.exists() for file in files.values()):
            return None
        return cls(files, program, threads)

    def looks(self) -> dict[str, Look]:
        """Return, by name, callables that decode one sequence with as much context as our steps.

        They raise RuntimeError if llama.cpp fails.
        """
        return {
            f"llama.cpp {name}": partial(
                self._look, LlamaCpp(self.program, file, self.threads, file.with_suffix(".log"))
            )
            for name, file in self.files.items()
        }

    @staticmethod
    def _look(engine: LlamaCpp) -> float:
        return 1 / engine.run(Task("decode", 1, DECODE_CONTEXT), 1, _TOKENS).tokens_per_s
