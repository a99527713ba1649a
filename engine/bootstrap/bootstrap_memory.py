"""A bootstrap program's memory: weights mapped from their files, and space for everything else.

Knows files and addresses; does not know what is computed.
"""

import os
from pathlib import Path

from pilotlight.engine.bootstrap.program import Address, BootstrapProgram
from pilotlight.kernels.cpu.mapped_file import MappedFile, MappedParts, Zeros, map_parts, opened


class ProgramMemory:
    def __init__(
        self, program: BootstrapProgram, file: Path, weights_at: int, directory: Path, num_blocks: int
    ) -> None:
        """`weights_at`: their offset in the program's own `file`; `directory`: the checkpoint's.

        Raises OSError.
        """
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
                joined = map_parts((directory / part.file, part.start, part.num_bytes) for part in weight.parts)
                self._joined.append(joined)
                weights.append(joined.address)
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
            with opened(file) as fd:
                self._maps[file] = MappedFile(fd, os.fstat(fd).st_size)
        return self._maps[file]
