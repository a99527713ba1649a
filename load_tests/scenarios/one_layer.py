"""One layer of Kimi K2.5 at full width, experts random in INT4, loaded and run on this CPU: time for each GB, and peak memory beside the file's size.

python -m load_tests.scenarios.one_layer --folder FOLDER     with 10 GB of disk and 12 of memory; --experts 24 for a sixteenth
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from load_tests.random_checkpoint import ember_vocab, write_tensors
from load_tests.records import write_record

SUBJECT = "one-layer"
_HIDDEN, _INNER, _HEADS, _QUERY_RANK, _LATENT, _ROTARY, _KEY, _VALUE = 7168, 2048, 64, 1536, 512, 64, 128, 128
_GROUP = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoint, which is removed at the end")
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    directory = options.folder / f"one-layer-{options.experts}"
    try:
        vocab = ember_vocab()
        write_tensors(directory, config(options.experts, vocab), tensors(options.experts, vocab))
        results = measure(directory, options.threads)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    for name, value in results.items():
        print(f"{name:>24}  {value}")
    print(f"Record: {write_record(SUBJECT, {'experts': options.experts, **results})}")
    return 0


def measure(directory: Path, threads: int) -> dict[str, Any]:
    file_bytes = (directory / "model.safetensors").stat().st_size
    host = json.dumps({"device": "cpu", "kv_bytes": 16 << 20, "threads": threads})
    command = [sys.executable, "-m", "load_tests.model_process", str(directory), host]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(line: str) -> dict[str, Any]:
            print(line, file=process.stdin, flush=True)
            answer: dict[str, Any] = json.loads(process.stdout.readline())  # type: ignore[union-attr]
            return answer

        process.stdout.readline()
        before = _peak_bytes(process.pid)
        loaded = ask("load")
        load_s, peak = sum(loaded["load_phases"].values()), _peak_bytes(process.pid)
        decoded, prompt = ask("generate 1 4 16"), ask("generate 1 256 1 1")
        peak_at_work = _peak_bytes(process.pid)
        process.stdin.close()
        process.wait(60)
    return {
        "file_gb": round(file_bytes / 1e9, 3),
        "load_s": round(load_s, 2),
        "load_s_per_gb": round(load_s / file_bytes * 1e9, 3),
        "before_load_gb": round(before / 1e9, 3),
        "peak_gb": round(peak / 1e9, 3),
        "peak_of_file": round((peak - before) / file_bytes, 3),
        "peak_at_work_of_file": round((peak_at_work - before) / file_bytes, 3),
        "decode_ms": round(1000 * (decoded["taken_s"] - decoded["first_token_s"]) / 15, 2),
        "prefill_256_ms": round(1000 * prompt["first_token_s"], 1),
        "load_phases": {name: round(spent, 3) for name, spent in loaded["load_phases"].items()},
        "threads": threads,
    }


def config(experts: int, vocab: int) -> dict[str, object]:
    """Kimi K2.5's, as tests/engine/planning/configs keeps it, with one layer and a small vocabulary."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": _HIDDEN, "num_hidden_layers": 1, "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS, "intermediate_size": 18432, "moe_intermediate_size": _INNER, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
        "q_lora_rank": _QUERY_RANK, "kv_lora_rank": _LATENT, "qk_rope_head_dim": _ROTARY, "qk_nope_head_dim": _KEY, "v_head_dim": _VALUE,
        "vocab_size": vocab, "max_position_embeddings": 4096, "rope_theta": 50_000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups},
    }  # fmt: skip


def tensors(experts: int, vocab: int) -> dict[str, tuple[int, ...]]:
    layer, hidden = "model.layers.0", _HIDDEN
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    named: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{attention}.q_a_proj.weight": (_QUERY_RANK, hidden),
        f"{attention}.q_a_layernorm.weight": (_QUERY_RANK,),
        f"{attention}.q_b_proj.weight": (_HEADS * (_KEY + _ROTARY), _QUERY_RANK),
        f"{attention}.kv_a_proj_with_mqa.weight": (_LATENT + _ROTARY, hidden),
        f"{attention}.kv_a_layernorm.weight": (_LATENT,),
        f"{attention}.kv_b_proj.weight": (_HEADS * (_KEY + _VALUE), _LATENT),
        f"{attention}.o_proj.weight": (hidden, _HEADS * _VALUE),
        f"{mlp}.gate.weight": (experts, hidden),
        f"{mlp}.gate.e_score_correction_bias": (experts,),
    }
    for part, (rows, columns) in {
        "gate_proj": (_INNER, hidden),
        "up_proj": (_INNER, hidden),
        "down_proj": (hidden, _INNER),
    }.items():
        named[f"{mlp}.shared_experts.{part}.weight"] = (rows, columns)
        for i in range(experts):
            named[f"{mlp}.experts.{i}.{part}.weight_packed"] = (rows, columns // 8)
            named[f"{mlp}.experts.{i}.{part}.weight_scale"] = (rows, columns // _GROUP)
    return dict(sorted(named.items()))


def _peak_bytes(pid: int) -> int:
    """The most memory that the process has had, shared and mapped pages among it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


if __name__ == "__main__":
    sys.exit(main())
