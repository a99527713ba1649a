"""The system's calls for files, of which a test replaces some."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class FaultyFiles:
    pread: Callable[[int, int, int], bytes] = os.pread
    preadv: Callable[[int, Any, int], int] = os.preadv
    pwritev: Callable[[int, Any, int], int] = os.pwritev
