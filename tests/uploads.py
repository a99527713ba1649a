"""Small adapters and upload forms that contain them, made without torch, for a model whose config.json is TINY."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from pilotlight.engine.adapters.peft import CONFIG, WEIGHTS

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 24, "vocab_size": 300, "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 10000.0,
    "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
ROWS = {"q_proj": 16, "k_proj": 8}
BOUNDARY = "a-boundary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


def adapter_files(rank: int = 4, columns: int = 16, value: float = 0.1, **config: Any) -> dict[str, bytes]:
    """Return the files of an adapter by name."""
    tensors = {}
    for module, rows in ROWS.items():
        name = f"base_model.model.model.layers.0.self_attn.{module}"
        tensors[f"{name}.lora_A.weight"] = np.full((rank, columns), 0.1, np.float32)
        tensors[f"{name}.lora_B.weight"] = np.full((rows, rank), value, np.float32)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": [*ROWS], "model_type": "llama"}
    return {CONFIG: json.dumps(settings | config).encode(), WEIGHTS: save(tensors)}


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def form(content: bytes, file_name: str, *, field: str = "file") -> bytes:
    """Return the body of a form whose content type is FORM."""
    return (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file_name"\r\n\r\n{file_name}\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"; filename="upload"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n"
    ).encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()  # fmt: skip
