"""Checkpoints of Llama's shape with random weights, of any size, with Ember's tokenizer.

A checkpoint is written in parts, so it need not fit in memory. The bytes are slices of one block of random numbers: readers of weights see no
difference, and three billion weights are written at the disk's speed.
"""

import json
import shutil
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pilotlight.engine

EMBER = Path(pilotlight.engine.__file__).parent / "embedded" / "ember"
_BLOCK_ELEMENTS = 1 << 24


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int = 4096


SHAPES = {
    "50m": Shape(512, 1536, 8, 8, 4, 64),
    "3b": Shape(3072, 8192, 30, 24, 8, 128),
    "8b": Shape(4096, 14336, 32, 32, 8, 128, context=16384),  # the shape of Llama 3.1 8B, with a small vocabulary
}
SEEING_TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}{%- for part in message.content %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}
{{- '<|im_end|>\\n' }}{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
AGENT = Shape(64, 128, 1, 2, 1, 32, context=65536)  # a coding agent's first prompt has up to 40,000 of Ember's tokens


def write(directory: Path, shape: Shape) -> Path:
    """Write a checkpoint atomically; keep one that exists already."""
    vocab = ember_vocab()
    return write_tensors(directory, config(shape, vocab), tensors(shape, vocab))


def write_for_agents(directory: Path) -> Path:
    """Write a checkpoint with a long context in which every eighth token ends an answer."""
    write(directory, AGENT)
    for name in ("config.json", "generation_config.json"):
        file = directory / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": list(range(2, ember_vocab(), 8))}))
    return directory


def write_seeing(directory: Path) -> Path:
    """Write a Qwen 3-VL checkpoint.

    A small picture is enlarged to some 200 patches. The text model has the shape `AGENT`, except for its context.
    """
    from tokenizers import Tokenizer
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    directory.mkdir(parents=True)
    add_tokenizer(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    first = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(SEEING_TEMPLATE)
    text: dict[str, Any] = {
        "hidden_size": AGENT.hidden, "intermediate_size": AGENT.intermediate, "num_hidden_layers": AGENT.layers,
        "num_attention_heads": AGENT.heads, "num_key_value_heads": AGENT.kv_heads, "head_dim": AGENT.head_dim, "vocab_size": first + 4,
        "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]},
    }  # fmt: skip
    vision: dict[str, Any] = {
        "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": AGENT.hidden, "patch_size": 16,
        "num_position_embeddings": 64, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    ids: dict[str, Any] = {
        f"{name}_token_id": first + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))
    }
    written: Any = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    written.eos_token_id = written.text_config.eos_token_id = 2
    maker: Any = AutoModelForImageTextToText
    maker.from_config(written, dtype=torch.bfloat16).save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 50_000, "max_pixels": 100_000}))
    return directory


def write_tensors(directory: Path, config: dict[str, object], named: dict[str, tuple[int, ...]]) -> Path:
    """Write tensors and their config.json, as `write` does.

    Those whose names end in "_packed" are words of four-bit codes, all others bf16.
    """
    if (directory / "model.safetensors").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    add_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    partial = directory / "model.safetensors.partial"
    _write_weights(partial, named)
    partial.rename(directory / "model.safetensors")
    return directory


def ember_vocab() -> int:
    return int(json.loads((EMBER / "config.json").read_text())["vocab_size"])


def add_tokenizer(directory: Path) -> None:
    """Add Ember's tokenizer.

    Ids of a larger vocabulary than Ember's have no text.
    """
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBER / name, directory / name)


def config(shape: Shape, vocab: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": vocab, "max_position_embeddings": shape.context,
        "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16", "torch_dtype": "bfloat16",
    }  # fmt: skip


def tensors(shape: Shape, vocab: int) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, shape.hidden)}
    for i in range(shape.layers):
        layer = f"model.layers.{i}"
        named |= {
            f"{layer}.input_layernorm.weight": (shape.hidden,),
            f"{layer}.self_attn.q_proj.weight": (queries, shape.hidden),
            f"{layer}.self_attn.k_proj.weight": (keys, shape.hidden),
            f"{layer}.self_attn.v_proj.weight": (keys, shape.hidden),
            f"{layer}.self_attn.o_proj.weight": (shape.hidden, queries),
            f"{layer}.post_attention_layernorm.weight": (shape.hidden,),
            f"{layer}.mlp.gate_proj.weight": (shape.intermediate, shape.hidden),
            f"{layer}.mlp.up_proj.weight": (shape.intermediate, shape.hidden),
            f"{layer}.mlp.down_proj.weight": (shape.hidden, shape.intermediate),
        }
    named |= {"model.norm.weight": (shape.hidden,), "lm_head.weight": (vocab, shape.hidden)}
    # In the order in which safetensors writes them: neighbouring tensors decide how much can be used in place.
    return dict(sorted(named.items()))


def _write_weights(path: Path, named: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dimensions in named.items():
        dtype, item = ("I32", 4) if name.endswith("_packed") else ("BF16", 2)
        size = item * torch.Size(dimensions).numel()
        header[name] = {"dtype": dtype, "shape": list(dimensions), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(20261121)
    random = (torch.randn(_BLOCK_ELEMENTS, generator=generator) * 0.02).bfloat16()
    block = random.view(torch.uint8).numpy().tobytes()
    ones = torch.ones(1, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, (name, dimensions) in enumerate(named.items()):
            left = (4 if name.endswith("_packed") else 2) * torch.Size(dimensions).numel()
            if len(dimensions) == 1:
                file.write(ones * (left // 2))
                continue
            offset = 4096 * (7919 * number % 4096)
            while left:
                piece = block[offset : offset + left]
                file.write(piece)
                left, offset = left - len(piece), 0
