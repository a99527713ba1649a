"""Tables of the fastest form of a product on a device, by its sizes.

A device's table is in kernels/tuned/ of the package or in the user's cache, which takes precedence. A command of load_tests measures it. cuBLAS
computes products whose sizes are not in the table.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pilotlight.kernels.matrices.weight import plain_operands

log = logging.getLogger(__name__)

MOST_TOKENS = 8  # most rows of x in a table; with more, cuBLAS's tiles are full enough
_VERSION = 1  # version of the file format
_SHIPPED = Path(__file__).parent / "tuned"


class Sizes(NamedTuple):
    """The sizes of a product x [tokens, columns] with a weight [rows, columns].

    `tokens` is rounded up by `tokens_class`.
    """

    tokens: int
    rows: int
    columns: int


class SplitKTile(NamedTuple):
    """A tile of the split-K product in kernels/triton/matrices/linear.py."""

    tokens: int
    rows: int
    half: int
    warps: int
    splits: int


Table = dict[Sizes, SplitKTile]


class TileTables:
    """The tables of all devices, each read at its first use."""

    def __init__(self, shipped: Path = _SHIPPED) -> None:
        self._shipped = shipped
        self._read: dict[torch.device, Table] = {}

    def best_tile(self, tokens: int, rows: int, columns: int, device: torch.device) -> SplitKTile | None:
        """Return the measured tile for a product, or None to use cuBLAS."""
        if tokens > MOST_TOKENS:
            return None
        table = self._read.get(device)
        if table is None:
            table = self._read[device] = self._find(device)
        return table.get(Sizes(tokens_class(tokens), rows, columns))

    def _find(self, device: torch.device) -> Table:
        name = device_name(device)
        for folder in (_user_folder(), self._shipped):
            file = folder / f"{name}.json"
            if file.exists():
                return read_table(file)
        return {}


best_tile = TileTables().best_tile


def tokens_class(tokens: int) -> int:
    """Return the number of tokens rounded up to 1, 2, 4 or 8."""
    return 1 << (tokens - 1).bit_length()


def device_name(device: torch.device) -> str:
    """Return the name of a device for its file, such as nvidia-h200."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def read_table(file: Path) -> Table:
    """Read a table. An unreadable one counts as empty, with a warning, because it only costs speed."""
    try:
        content = json.loads(file.read_bytes())
        if content["version"] != _VERSION:
            log.warning("%s has another version (%s) and is not used; tune again", file, content["version"])
            return {}
        return {Sizes(*map(int, key.split())): SplitKTile(*map(int, value)) for key, value in content["gemv"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s is not a table of measurements and is not used: %r", file, error)
        return {}


def write_table(file: Path, table: Table, facts: dict[str, Any]) -> None:
    """Write a table. `facts` are the machine and the time of the measurement."""
    rows = {" ".join(map(str, sizes)): list(chosen) for sizes, chosen in sorted(table.items())}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({"version": _VERSION, **facts, "gemv": rows}, indent=1) + "\n")
    unfinished.replace(file)


def save(table: Table, device: torch.device, facts: dict[str, Any]) -> Path:
    """Add `table` to the table in the user's cache, for later processes; return its file."""
    file = _user_folder() / f"{device_name(device)}.json"
    write_table(file, (read_table(file) if file.exists() else {}) | table, facts)
    return file


def run(chosen: SplitKTile, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    from pilotlight.kernels.triton.matrices import linear as form  # imported here, because Triton may be missing

    tile = form.Tile(chosen.tokens, chosen.rows, chosen.half, chosen.warps, 3)
    result: torch.Tensor = form.product(x, plain_operands(weight), bias, tile, chosen.splits)
    return result


def _user_folder() -> Path:
    try:
        cached = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home directory
        return _SHIPPED
    return cached / "pilotlight" / "tuned"
