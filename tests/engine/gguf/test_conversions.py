"""Files that llama.cpp's own converter makes of tiny checkpoints give the log-probabilities of `transformers`.

The converter is in the source tree that `make peers` fetches; without it these tests are skipped, and the files that tests/engine/gguf/files.py
writes are the only ones.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, normalizers
from tokenizers.models import BPE
from transformers import (
    AutoTokenizer,
    GraniteMoeSWAConfig,
    GraniteSWAConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SolarOpenConfig,
)

from pilotlight.engine.gguf.directory import directory_of
from pilotlight.engine.tokenizer.spelling import WORD_MARK
from pilotlight.engine.tokenizer.tokenizer import Tokenizer as Ours
from tests.checkpoints import change_tensors, write_checkpoint, write_tokenizer
from tests.engine.agreement import VOCAB, assert_agrees, full
from tests.engine.driver import load_engine, one, random_prompt
from tests.engine.families import FURTHER, MODELS, config
from tests.engine.gguf.files import SHAPE
from tests.engine.gguf.test_directory import FAMILIES
from tests.engine.pictures import write_vision

ROOT = Path(__file__).parents[3]
TREES = sorted((ROOT / ".peers").glob("llama/*/vendor/llama.cpp"))
pytestmark = [
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.skipif(not TREES, reason="make peers fetches llama.cpp"),
]
# Checkpoints of awkward sizes whose settings files contain.
AWKWARD = (
    "llama, three heads over one, tied",
    "deepseek-v3, queries at once, no groups, tied",
    "deepseek-v2, best of two of four groups, yarn",
    "deepseek-v2, queries at once, no groups, tied",
    "glm-4.7-flash, three of eight experts",
    "glm-4.7-flash, queries at once, all layers of experts, tied",
    "mimo-v2, windows but in layers 0 and 3, narrow values",
    "mimo-v2, one kv head, values as they are, tied",
    "gemma4, wider heads where nothing is hidden, keys are values, capped",
    "gemma4, one kv head, tied",
    "gemma4, inputs of layers, layers 4 to 6 read keys of 2 and 3, twice as wide, capped",
    "gemma4, three of five experts beside a dense part, keys are values",
)
WITH_TOWERS = (
    "qwen 2.5 vl",
    "qwen 3 vl",
    "qwen 3 vl, experts",
    "qwen 2.5 vl, three heads over one, tied",
    "qwen 3 vl, three heads over one, tied",
    "mistral 3",
)
GLM_TOKENS = ("[gMASK]", "<sop>", "<|user|>", "<|observation|>", "<|system|>")
PROMPT = random_prompt(40, seed=8)


def described(name: str) -> PreTrainedConfig:
    if name in AWKWARD:
        return (MODELS | FURTHER)[name]
    kind, changes = (FAMILIES | ONLY_CONVERTED)[name]
    return config(kind, **(SHAPE | changes))


# The converter wants the SentencePiece tokenizers of these models, and HunYuan's own.
CONVERTED = [
    name for name in FAMILIES if not name.startswith(("gemma 1", "gemma2", "gemma3", "phi3", "ernie", "hunyuan-moe"))
]
# Families that llama.cpp's published package cannot write yet, or whose files have another family's architecture.
ONLY_CONVERTED: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "granite-swa": (
        GraniteSWAConfig,
        {"head_dim": None, "num_hidden_layers": 5, "sliding_window": 11, "attention_multiplier": 0.2, "logits_scaling": 2.5},
    ),
    "granite-moe-swa": (
        GraniteMoeSWAConfig,
        {
            "head_dim": None, "num_hidden_layers": 5, "sliding_window": 11, "intermediate_size": 32, "num_local_experts": 4,
            "num_experts_per_tok": 2, "shared_intermediate_size": 24,
        },
    ),
    "solar-open": (
        SolarOpenConfig,
        {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "routed_scaling_factor": 1.7},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CONVERTED, *AWKWARD, *ONLY_CONVERTED])
def test_a_converted_checkpoint_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "checkpoint", described(name))
    check(convert(tmp_path), model, tmp_path)


@pytest.mark.parametrize("name", WITH_TOWERS)
def test_the_text_of_a_model_with_a_tower_agrees_with_transformers(name: str, tmp_path: Path) -> None:
    model = write_vision(tmp_path / "checkpoint", name).model
    check(convert(tmp_path), model, tmp_path)


def check(file: Path, model: PreTrainedModel, folder: Path) -> None:
    heard = one(
        load_engine(directory_of(file, folder / "store")), full("a", PROMPT, max_tokens=6, prompt_logprobs=True)
    )
    assert_agrees(model, PROMPT, heard)


def convert(folder: Path) -> Path:
    """Convert the checkpoint in `folder`, as published, to a file of fp32."""
    directory, file = folder / "checkpoint", folder / "converted.gguf"
    keys = json.loads((directory / "config.json").read_text())
    write_tokenizer(directory)
    if keys["model_type"] == "gemma4_text":
        _write_gemma_tokenizer(directory)
    if keys["model_type"] == "qwen3_vl_moe":  # published with the matrices of experts transposed
        change_tensors(directory, _transpose_experts)
    if keys["model_type"].startswith("glm"):
        _rename_tokens(directory, GLM_TOKENS)
    if keys["model_type"] == "solar_open":
        _rename_tokens(directory, ("<unk>", "<|startoftext|>"))
    for part in (keys, keys.get("text_config", {})):  # defaults that the small vocabulary does not have
        part |= {key: None for key in ("bos_token_id", "pad_token_id") if (part.get(key) or 0) >= VOCAB}
    (directory / "config.json").write_text(json.dumps(_as_published(keys)))
    program = [sys.executable, str(ROOT / "load_tests" / "peers" / "convert.py"), str(TREES[-1])]
    made = subprocess.run(
        [*program, str(directory), "--outfile", str(file), "--outtype", "f32"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return file


def _as_published(keys: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of published files that `transformers` leaves out."""
    kind = keys["model_type"]
    if kind == "minimax_m2":
        return keys | {"rotary_dim": int(keys["head_dim"] * keys["rope_parameters"]["partial_rotary_factor"])}
    if kind == "deepseek_v3":
        return keys | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if kind == "mistral4":
        return {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "model_type": "mistral3",
            "text_config": keys | {"architectures": None},
        }
    if kind == "solar_open":
        return keys | {"intermediate_size": 96, "first_k_dense_replace": 0, "use_qk_norm": False}
    if kind == "afmoe":
        return keys | {"route_norm": True}
    if kind == "glm4_moe_lite":
        return keys | {"first_k_dense_replace": keys["mlp_layer_types"].count("dense")}
    if kind != "mimo_v2_flash":
        return keys
    rope, windows = keys.pop("rope_parameters"), [int(each == "sliding_attention") for each in keys["layer_types"]]
    same = {f"swa_{key}": keys[key] for key in ("head_dim", "num_attention_heads", "v_head_dim")}
    window = keys["sliding_window"] - 1
    return {
        **keys,
        **same,
        "model_type": "mimo",  # else transformers rewrites the keys below before the converter, which was made for an older one, reads them
        "swa_num_key_value_heads": 2 * keys["num_key_value_heads"],
        "hybrid_layer_pattern": windows,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "sliding_window": window,
        "sliding_window_size": window,
        "layernorm_epsilon": keys["rms_norm_eps"],
        "rope_theta": rope["full_attention"]["rope_theta"],
        "swa_rope_theta": rope["sliding_attention"]["rope_theta"],
        "partial_rotary_factor": rope["full_attention"]["partial_rotary_factor"],
    }


def _transpose_experts(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()


def _rename_tokens(directory: Path, names: tuple[str, ...]) -> None:
    """Give the last tokens of a tokenizer these names, and make them special."""
    file = directory / "tokenizer.json"
    known = json.loads(file.read_text())
    model, last = known["model"], max(known["model"]["vocab"].values())
    vocabulary = {text: i for text, i in model["vocab"].items() if i <= last - len(names)}
    renamed = {name: last - i for i, name in enumerate(names)}
    model["vocab"] = vocabulary | renamed
    model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= vocabulary.keys()]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    known["added_tokens"] += [
        {"id": i, "content": name, **plain} for name, i in sorted(renamed.items(), key=lambda item: item[1])
    ]
    file.write_text(json.dumps(known))


def _write_gemma_tokenizer(directory: Path) -> None:
    """Write a tokenizer of Gemma's kind, of the usual size, with bytes and listed merges."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", WORD_MARK, "\n"]
    pairs = [(left, right) for left in "abcdefgh" for right in "ijklmnopqrstu"][: VOCAB - 4 - 256 - len(letters)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokens += ["".join(pair) for pair in pairs]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(BPE(vocabulary, pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", WORD_MARK)
    made.decoder = decoders.Sequence([decoders.Replace(WORD_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(tokens[:4])
    made.save(str(directory / "tokenizer.json"))
    special = {f"{key}_token": f"<{key}>" for key in ("pad", "eos", "bos", "unk")}
    (directory / "tokenizer_config.json").write_text(
        json.dumps(special | {"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def test_gemmas_tokenizer_survives_the_conversion(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", described("gemma4, one kv head, tied"))
    directory = directory_of(convert(tmp_path), tmp_path / "store")
    original = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    for text in ("the pilot light", "ai bj\n\ncost: 12 \u00e9"):
        assert list(Ours.from_directory(directory).encode(text)) == original.encode(text, add_special_tokens=False)
