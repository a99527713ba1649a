"""The levels of x86-64 for which a wheel has a library, and the choice of one for a machine.

A level is a set of instructions; the library of the highest level that the CPU supports is used. All levels compute the same bits. A checkout has no
such library and compiles one for its machine (build.py).
"""

import hashlib
import logging
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent


class Level(NamedTuple):
    name: str
    flags: tuple[str, ...]  # for the C compiler
    needs: tuple[str, ...]  # CPU features, as named in /proc/cpuinfo


_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx2", "fma", "bmi2")
_BF16 = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")
# The highest instruction-set level first. LEVEL1_KIB is the size of the L1 data cache of a core, on CPUs that support this level and no higher one.
LEVELS = (
    Level(
        "amx",
        (*_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8", "-DLEVEL1_KIB=48"),
        (*_AVX512, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8"),
    ),
    # Zen 5: AVX-VNNI is not used, but Zen 4, whose cache is smaller, lacks it. A product of 12 rows takes two thirds of the time of "bf16".
    Level("zen5", (*_BF16, "-DLEVEL1_KIB=48"), (*_AVX512, "avx512_vnni", "avx512_bf16", "avx_vnni")),
    Level("bf16", (*_BF16, "-DLEVEL1_KIB=32"), (*_AVX512, "avx512_vnni", "avx512_bf16")),
    Level("vnni", ("-march=x86-64-v4", "-mavx512vnni", "-DLEVEL1_KIB=32"), (*_AVX512, "avx512_vnni")),
    Level("avx512", ("-march=x86-64-v4", "-DLEVEL1_KIB=32"), _AVX512),
    Level("avx2", ("-march=x86-64-v3", "-DLEVEL1_KIB=32"), ("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe")),
)


def find(processor: str, folder: Path = FOLDER) -> Path | None:
    """Return the library of the highest level that a processor supports, or None if there is none.

    `processor`: the processor's lines of /proc/cpuinfo. A file whose digest differs from the one in its name is damaged and is skipped.
    """
    has = set(processor.split())
    for level in LEVELS:
        if not has.issuperset(level.needs):
            continue
        for path in folder.glob(f"{level.name}-*.so"):
            if path.stem == name_of(level, path):
                return path
            log.warning("the CPU kernels in %s are damaged: install the package again", path)
    return None


def name_of(level: Level, library: Path) -> str:
    """Return the name of a library, without its suffix."""
    return f"{level.name}-{hashlib.sha256(library.read_bytes()).hexdigest()[:32]}"
