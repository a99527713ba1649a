"""How many bytes a model's weights will take, guessed from its files before an engine has read them.

Knows file sizes and the types in a safetensors header; the first load says the truth.
"""

import json
import struct
from pathlib import Path

_SMALL_BYTES = 200_000_000  # of 16-bit weights: below it a CPU computes in fp32 (engine/loading.py), at twice the bytes
_MAX_HEADER = 100 << 20


def estimated_bytes(directory: Path, dtype: str, *, on_cpu: bool) -> int:
    """Guess from the files. 0 where there is nothing to be seen: the load will say why."""
    try:
        files = sorted(directory.glob("*.safetensors"))
        total = sum(file.stat().st_size for file in files)
        if not files:
            return 0
        is_half = "F32" not in _dtypes(files[0])
    except (OSError, ValueError):
        return 0
    widened = dtype == "float32" or (dtype == "auto" and on_cpu and total < _SMALL_BYTES)
    return 2 * total if is_half and widened else total


def _dtypes(file: Path) -> set[str]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\0"))
        if length > _MAX_HEADER:
            raise ValueError(f"{file} has a header of {length} bytes")
        header = json.loads(opened.read(length))
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
