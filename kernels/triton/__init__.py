"""The Triton forms of operations, for CUDA devices, with the names and signatures of kernels/.

Compiled kernels are stored beside the project's other compiled files, unless TRITON_CACHE_DIR names a folder.
"""

import os
from pathlib import Path

os.environ.setdefault(
    "TRITON_CACHE_DIR",
    str(Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pilotlight" / "triton"),
)
