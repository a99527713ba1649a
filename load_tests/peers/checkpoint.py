"""The checkpoint that all engines read: Llama's shape, half a billion random weights in bf16, as safetensors and as GGUF.

Run as a program in an environment with torch, safetensors and numpy; GGUF needs the `gguf` package of llama.cpp's own tree.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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
    """Every weight but the embedding, of which a row is looked up."""
    return 2 * sum(torch.Size(shape).numel() for name, shape in shapes().items() if "embed" not in name)


def flops_per_prompt(tokens: int) -> float:
    """2 per weight of the layers and token, causal attention's 4 per pair and head element, halved, and one row of logits."""
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


def write_gguf(directory: Path, gguf_package: Path) -> None:
    """llama.cpp turns neighbouring dimensions together instead of halves: queries and keys are reordered as its own converter does."""
    sys.path.insert(0, str(gguf_package))
    import gguf

    partial = directory / "model.gguf.partial"
    writer = gguf.GGUFWriter(str(partial), "llama")
    writer.add_vocab_size(VOCAB)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in load_file(directory / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight",))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = HEADS if "q_proj" in name else KV_HEADS
            tensor = tensor.view(heads, 2, HEAD_DIM // 2, HIDDEN).transpose(1, 2).reshape(tensor.shape)
        if tensor.dim() == 1:
            writer.add_tensor(target, tensor.float().numpy())
        else:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(directory / "model.gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gguf", type=Path, help="llama.cpp's gguf-py directory")
    options = parser.parse_args()
    if not (options.directory / "model.safetensors").exists():
        write_safetensors(options.directory)
    if options.gguf and not (options.directory / "model.gguf").exists():
        write_gguf(options.directory, options.gguf)


if __name__ == "__main__":
    main()
