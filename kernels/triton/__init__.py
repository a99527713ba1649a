"""The Triton forms of the operations in kernels/: the same names and signatures, for CUDA devices.

Compiled kernels are stored beside the project's other compiled files, unless TRITON_CACHE_DIR names a folder.
"""

import os
from pathlib import Path

os.environ.setdefault(
    "TRITON_CACHE_DIR",
    str(Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pilotlight" / "triton"),
)
