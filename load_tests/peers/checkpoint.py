"""The checkpoint that all engines read: Llama's shape, half a billion random weights in bf16.

Written as safetensors and as GGUF. Run as a program in an environment with torch, safetensors and numpy; GGUF needs the `gguf` package of llama.cpp's
own tree.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from load_tests.peers.gguf_file import write_gguf

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB = 1024, 4096, 28, 16, 8, 32000
HEAD_DIM = HIDDEN // HEADS
CONTEXT, THETA, EPS = 8192, 500_000.0, 1e-5
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT, "rope_theta": THETA, "rms_norm_eps": EPS, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", "torch_dtype": "bfloat16",
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    kv = KV_HEADS * HEAD_DIM
    named: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        named |= {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (kv, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (kv, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return named


def bytes_read_per_token() -> int:
    """Return the bytes of every weight except the embedding, of which only a row is looked up."""
    return 2 * sum(torch.Size(shape).numel() for name, shape in shapes().items() if "embed" not in name)


def flops_per_prompt(tokens: int) -> float:
    """Return a prompt's floating-point operations.

    These are 2 per weight of the layers and token, 2 per head element and pair of tokens (half of 4, as attention is causal), and one row of
    logits.
    """
    weights = sum(torch.Size(shape).numel() for name, shape in shapes().items() if name.startswith("model.layers"))
    return 2.0 * weights * tokens + 2.0 * LAYERS * HIDDEN * tokens * tokens + 2.0 * VOCAB * HIDDEN


def write_safetensors(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(20261121)
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * 0.02).bfloat16()
        for name, shape in shapes().items()
    }
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    partial = directory / "model.safetensors.partial"
    save_file(tensors, partial, {"format": "pt"})
    partial.rename(directory / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gguf", type=Path, help="llama.cpp's gguf-py directory")
    options = parser.parse_args()
    if not (options.directory / "model.safetensors").exists():
        write_safetensors(options.directory)
    if options.gguf:
        write_gguf(options.directory, options.gguf, options.directory)


if __name__ == "__main__":
    main()
