"""A bootstrap program's memory in this process: weights mapped from the files that hold them, and room for everything else.

Knows files and addresses; refuses to know what is computed.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine.bootstrap.program import Address, BootstrapProgram, FileRange
from kernels.cpu.mapped_file import MappedFile, MappedParts, OpenRange, Zeros


class ProgramMemory:
    def __init__(
        self, program: BootstrapProgram, file: Path, weights_at: int, directory: Path, num_blocks: int
    ) -> None:
        """`weights_at`: where they begin in the program's own `file`; `directory`: the checkpoint's. Raises OSError."""
        self.inputs = Zeros(program.inputs.num_bytes)
        self.kv = Zeros(num_blocks * program.block_bytes)
        self._work = [Zeros(size) for size in program.work]
        self._maps: dict[Path, MappedFile] = {}
        self._joined: list[MappedParts] = []
        weights = []
        for weight in program.weights:
            if not weight.parts:
                weights.append(self._map(file).address + weights_at + weight.start)
            elif len(weight.parts) == 1:
                (part,) = weight.parts
                weights.append(self._map(directory / part.file).address + part.start)
            else:
                weights.append(self._join(directory, weight.parts))
        self._addresses = {
            "weight": weights,
            "input": [self.inputs.address],
            "work": [memory.address for memory in self._work],
            "kv": [self.kv.address],
        }

    def __getitem__(self, address: Address) -> int:
        return self._addresses[address.memory][address.which] + address.offset

    def _map(self, file: Path) -> MappedFile:
        if file not in self._maps:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._maps[file] = MappedFile(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)
        return self._maps[file]

    def _join(self, directory: Path, parts: Sequence[FileRange]) -> int:
        with ExitStack() as files:
            opened = []
            for part in parts:
                fd = os.open(directory / part.file, os.O_RDONLY | os.O_CLOEXEC)
                files.callback(os.close, fd)
                opened.append(OpenRange(fd, part.start, part.num_bytes))
            joined = MappedParts(opened)
        self._joined.append(joined)
        return joined.address
