"""Writers of tiny random checkpoints of any family through `transformers`, and of a small byte-level tokenizer."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from training.ember.chat import HERE

AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # transformers 5.23 omits it
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Settings that reveal wrong assumptions, such as a head_dim other than hidden / heads and a vocabulary of an odd size.
AWKWARD: dict[str, Any] = {
    "vocab_size": 431,
    "hidden_size": 42,
    "intermediate_size": 123,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.15,  # keeps logits apart, so that greedy choices are not ties
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_llama_config(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**(AWKWARD | changes))


def write_llama(
    directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **changes: Any
) -> PreTrainedModel:
    return write_checkpoint(directory, tiny_llama_config(**changes), seed, dtype, max_shard_size)


def write_checkpoint(
    directory: Path,
    config: PreTrainedConfig,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> PreTrainedModel:
    """Write config.json, generation_config.json and model.safetensors; return the model."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        give_values(model)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def give_values(model: PreTrainedModel) -> None:
    """Give norms, biases and buffers random values: with the ones and zeros of transformers a mistake would not show."""
    for module in model.modules():
        if isinstance(module, GptOssExperts):  # transformers 5.17 and others ignore the config's values
            module.alpha = getattr(model.config, "swiglu_alpha", module.alpha)
            module.limit = getattr(model.config, "swiglu_limit", module.limit)
    if hasattr(model, "set_experts_implementation"):  # the grouped implementation needs multiples of four
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith(("bias", "sinks", "router.gate.weight")):
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif name.endswith(("router.scale", "per_expert_scale")):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(("alpha_p", "alpha_n")):  # of xIELU
                parameter.add_(torch.randn_like(parameter) * 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)


def write_speaking(directory: Path, config: PreTrainedConfig) -> Path:
    """Write a checkpoint with the embedded model's tokenizer (2,048 tokens) and chat template."""
    write_checkpoint(directory, config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(HERE / name, directory / name)
    return directory


def write_speaking_experts(directory: Path) -> Path:
    """Write a mixture-of-experts checkpoint with the embedded model's tokenizer and chat template."""
    sizes = {"vocab_size": 2048, "max_position_embeddings": 1024, "eos_token_id": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 27}
    return write_speaking(directory, Qwen3MoeConfig(**(AWKWARD | sizes | experts)))


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def pack_experts(directory: Path, model: PreTrainedModel) -> None:
    """Store the experts of a gpt-oss checkpoint in MXFP4, as in published checkpoints; round those of `model` to the same values."""
    tensors = load_file(directory / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del tensors[name]
            rows = parameter.data.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, rows, blocks, 32]
            exponents = rows.abs().amax(-1, keepdim=True).log2().floor() - 2
            codes = (rows / exponents.exp2()).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
            tensors[f"{name}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).byte()
            tensors[f"{name}_scales"] = (exponents.squeeze(-1) + 127).byte()
            parameter.data.copy_((E2M1[codes] * exponents.exp2()).flatten(2).transpose(1, 2))
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level BPE tokenizer of 431 entries, ChatML markers included: the vocabulary size of `tiny_llama_config`."""
    tokenizer = Tokenizer(BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=431,
        special_tokens=["<|endoftext|>", "<|im_end|>", "<|im_start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = "the pilot light of a gas stove burns small and blue until somebody wants warm water or a hot meal"  # data
    tokenizer.train_from_iterator([words, words.upper(), words.title()], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def change_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
