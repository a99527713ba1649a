"""The kernel variants in a model's dry run and in real steps, and the causes of waits for the device. The product's runner makes the steps, without a
GPU. It runs as a module, since Triton compiles in this process and interprets in that of the tests.

    PILOTLIGHT_TRITON=1 python -m tests.engine.variants [--compile]      prints one JSON object, a row for each model
"""

import argparse
import json
from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import pilotlight.engine.execution.decode_graphs
import pilotlight.engine.execution.runner
from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.chunk_steps import step_of
from pilotlight.engine.core.sequence import PENDING, Sequence
from pilotlight.engine.core.step import ChoiceRow
from pilotlight.engine.core.token_counts import TokenCounts
from pilotlight.engine.execution.decode_graphs import Outputs
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.kv.pool.layout import CacheLayout, in_fp8
from pilotlight.engine.loading.dry_run import DryRun, dry_run_launches, lay_out
from pilotlight.engine.models.model_registry import FAMILIES
from pilotlight.engine.scheduling.plan import Chunk
from pilotlight.engine.weights.bundles.bundle import TensorSpec
from pilotlight.engine.weights.config import architecture
from pilotlight.engine.weights.formats.weight_formats import read_format
from pilotlight.engine.weights.storage import MetaStorage
from pilotlight.kernels.warm_up import compile_launches, distinct, fake_tensor, trace_launches

BLOCK = 16
CONTEXT = 8192
NUM_BLOCKS = 4096
TOKENS = [9 + i % 100 for i in range(CONTEXT)]
BLOCKS = [1 + i % (NUM_BLOCKS - 1) for i in range(CONTEXT // BLOCK)]

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "num_hidden_layers": 2, "intermediate_size": 14336, "max_position_embeddings": CONTEXT,
}  # fmt: skip
SMALL = LLAMA | {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 3072, "vocab_size": 151936}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 262208, "intermediate_size": 10240, "sliding_window": 1024, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256, "layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280,
    "intermediate_size": 18432, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_V32 = DEEPSEEK | {
    "architectures": ["DeepseekV32ForCausalLM"], "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
}  # fmt: skip
GLM_5 = DEEPSEEK_V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"], "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32, "index_topk_pattern": "FS", "vocab_size": 154880, "n_group": 1, "topk_group": 1,
}  # fmt: skip
KIMI = DEEPSEEK | {
    "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840, "n_routed_experts": 384, "n_group": 1, "topk_group": 1,
}  # fmt: skip
SCOUT = LLAMA | {
    "architectures": ["Llama4ForCausalLM"], "hidden_size": 5120, "num_attention_heads": 40, "vocab_size": 202048, "intermediate_size": 8192,
    "intermediate_size_mlp": 16384, "num_local_experts": 16, "no_rope_layers": [1, 0], "attention_chunk_size": 4096,
}  # fmt: skip
GLM = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"], "num_attention_heads": 96, "vocab_size": 151552, "intermediate_size": 10944, "attention_bias": True,
    "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def matrices(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the sizes of the matrices of a layer that a quantizer packs: those of its experts if it has any, else all."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    if experts := config.get("n_routed_experts"):
        inner = config["moe_intermediate_size"]
        sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        return {f"mlp.experts.{i}.{part}": size for i in range(experts) for part, size in sizes.items()}
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip


def in_int4(rows: int, columns: int) -> dict[str, tuple[str, tuple[int, int]]]:
    return {
        "qweight": ("I32", (columns // 8, rows)),
        "qzeros": ("I32", (columns // 128, rows // 8)),
        "scales": ("F16", (columns // 128, rows)),
    }


def in_packed_groups(rows: int, columns: int) -> dict[str, tuple[str, tuple[int, int]]]:
    return {"weight_packed": ("I32", (rows, columns // 8)), "weight_scale": ("BF16", (rows, columns // 32))}


def in_fp8_by_row(rows: int, columns: int) -> dict[str, tuple[str, tuple[int, int]]]:
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", (rows, 1))}


def in_fp8_blocks(rows: int, columns: int) -> dict[str, tuple[str, tuple[int, int]]]:
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": ("F32", (-(-rows // 128), -(-columns // 128)))}


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": WEIGHTS}},
}
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACKED: dict[str, Any] = {
    "llama, GPTQ": (LLAMA, in_int4, GPTQ | {"sym": True}),
    "llama, GPTQ with zeros": (LLAMA, in_int4, GPTQ | {"sym": False}),
    "llama, FP8 by row": (LLAMA, in_fp8_by_row, {"quant_method": "fp8"}),
    "llama, FP8 by block": (LLAMA, in_fp8_blocks, FP8_BLOCKS),
    "kimi k2, INT4 experts": (KIMI, in_packed_groups, GROUPS),
    "deepseek-v3, FP8 experts": (DEEPSEEK, in_fp8_blocks, FP8_BLOCKS),
}
PLAIN: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, small": SMALL,
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"]},
    "mistral, window": LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
    "gemma3": LLAMA | GEMMA,
    "qwen3-moe": LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "num_key_value_heads": 4} | EXPERTS,
    "mixtral": LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss": LLAMA | {"architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
                        "num_attention_heads": 64, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128},
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3.2": DEEPSEEK_V32,
    "glm-5": GLM_5,
    "llama4": SCOUT,
    "glm-4.5": GLM,
}  # fmt: skip
FP8_CACHE = ", FP8 cache"
PLAIN |= {name + FP8_CACHE: PLAIN[name] for name in ("llama", "gpt-oss", "llama4", "glm-4.5", "deepseek-v3.2")}


class Noted(NamedTuple):
    """A fake recording of a step, which has only the outputs."""

    output: Outputs

    def replay(self) -> None:
        pass


class NotingRecorder:
    waits: "HostWaits"  # the counter of the running model

    def takes(self, rows: int) -> bool:
        return True

    def record(self, forward: Any) -> Noted:
        before = self.waits.num_copies
        noted = Noted(forward())
        self.waits.counted["a copy from the host during a recording"] += self.waits.num_copies - before
        return noted


def dry_run_of(name: str, num_layers: int = 2) -> DryRun:
    config, parts, method = PACKED[name] if name in PACKED else (PLAIN[name], None, {})
    config = config | {"num_hidden_layers": num_layers}
    raw = config | ({"quantization_config": method} if method else {})
    family = FAMILIES[architecture(raw)]
    parsed: Any = family.parse_config(raw)
    specs = [
        TensorSpec(f"model.layers.{i}.{matrix}.{part}", *stored)
        for i in range(config["num_hidden_layers"])
        for matrix, sizes in (matrices(config).items() if parts else ())
        for part, stored in parts(*sizes).items()
    ]
    cached = parsed.cached_layers
    if name.endswith(FP8_CACHE):
        cached = in_fp8(cached, torch.float8_e4m3fn)
    layout = CacheLayout(cached, BLOCK, torch.bfloat16, CONTEXT)
    format = read_format(raw) if parts else None
    return DryRun(family, parsed, MetaStorage(specs), torch.bfloat16, CONTEXT, layout, None, format, bool(parts))


READS = frozenset(
    ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "is_nonzero", "__bool__", "__int__", "__float__", "__index__")
)  # fmt: skip


class HostWaits(TorchFunctionMode):
    """A counter of waits for the device: reads of values, copies with memory that is not pinned, and blocking copies."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.num_copies = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if name == "pin_memory":
            pinned = args[0].clone()
            pinned.is_in_pinned_memory = True
            return pinned
        is_pinned = kwargs.pop("pin_memory", False)
        there = [is_there(part) for arg in args for part in (arg if isinstance(arg, list | tuple) else [arg])]
        if name in READS and any(there):
            self.counted[name] += 1
        if name == "copy_" and there[0] != there[1]:
            self._copy(args[1] if there[0] else args[0], kwargs)
            return args[0]
        if name == "__setitem__" and any(there) and not there[-1] and isinstance(args[-1], torch.Tensor):
            self.counted["a value of the host written into a tensor of the device"] += 1
        result = function(*args, **kwargs)
        if name in ("to", "tensor", "as_tensor", "from_numpy") and is_there(result) and not any(there):
            self._copy(args[0], kwargs)
        if is_pinned:
            result.is_in_pinned_memory = True
        return result

    def _copy(self, on_host: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("non_blocking") and getattr(on_host, "is_in_pinned_memory", False):
            self.num_copies += 1
        else:
            self.counted["a blocking copy"] += 1


def is_there(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_meta


KINDS = (
    SamplingParams(64, temperature=0.0),
    SamplingParams(64, temperature=0.7, seed=1),
    SamplingParams(64, temperature=1.0, top_k=20, top_p=0.9, min_p=0.1, num_logprobs=3),
    SamplingParams(64, temperature=0.0, num_logprobs=0, frequency_penalty=0.5, repetition_penalty=1.2, logit_bias=((5, 1.0), (7, -1.0))),
    SamplingParams(64, temperature=1.0, presence_penalty=0.5, num_logprobs=20, prompt_logprobs=True),
)  # fmt: skip


def chunk(length: int, new: int, kind: int, num_groups: int, drafts: int = 0, pending: bool = False) -> Chunk:
    """Return a chunk of the last `new` tokens of a sequence of `length` tokens."""
    made = Sequence("s", TOKENS[:length], KINDS[kind % len(KINDS)], b"", num_computed_tokens=length - new)
    blocks = -(-(length + drafts) // BLOCK)
    made.tables = [BlockTable(BLOCKS[:blocks]) for _ in range(num_groups)]
    if pending:
        made.token_ids[-1] = PENDING
    return Chunk(made, length - new, length, True, drafts=(3,) * drafts)


def steps(num_groups: int) -> Iterator[tuple[list[Chunk], bool]]:
    """Yield the chunks of steps as schedulers make them, and whether the previous step provides the tokens."""
    for rows in (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256):
        for context in (2, 130, 1601, 8000):
            if rows * context <= 270_000:
                yield [chunk(context + i % 3, 1, 0 if rows > 8 else i, num_groups) for i in range(rows)], False
                yield [chunk(context, 1, 0, num_groups, pending=True) for i in range(rows)], True
    for lens in (
        (1,),
        (2,),
        (7, 9),
        (16,),
        (17,),
        (40, 3, 1),
        (64,),
        (65,),
        (100,) * 3,
        (127, 256),
        (500,),
        (2047,),
        (2048,),
        (1024, 6000),
    ):
        for cached in (0, 800):
            for decodes in (0, 1, 8, 33):
                prompts = [chunk(cached + length, length, i, num_groups) for i, length in enumerate(lens)]
                yield [chunk(300 + i, 1, i, num_groups) for i in range(decodes)] + prompts, False


def run_steps(dry: DryRun) -> None:
    """Run the forward pass and the choice of tokens of every step, as an engine does."""
    cache = fake_tensor((NUM_BLOCKS * len(dry.layout.groups), dry.layout.block_bytes), torch.uint8)
    runner = ModelRunner(lay_out(dry), dry.layout, cache)
    for chunks, is_fed in steps(len(dry.layout.groups)):
        row_of = {one.sequence: i for i, one in enumerate(chunks)} if is_fed else None
        chunks.sort(key=lambda one: 0 if one.is_decode else 1 if one.drafts else 2)
        step = step_of(chunks, BLOCK, row_of)
        if is_fed:
            runner.chosen = fake_tensor((len(chunks),), torch.int64)
        for _ in range(
            2 if len(step.token_ids) <= 300 else 1
        ):  # small steps run twice: the second time padded and recorded
            forwarded = runner.forward(step)
        runner.choose(forwarded, choice_rows(chunks))


def choice_rows(chunks: list[Chunk]) -> list[ChoiceRow]:
    rows: list[ChoiceRow] = []
    for i, one in enumerate(chunks):
        sampling = one.sequence.sampling
        counts = TokenCounts(sampling, one.sequence.num_prompt_tokens) if sampling.adjusts_logits else None
        if counts is not None:
            counts.catch_up(one.sequence.token_ids, one.end - i % 3)
        mask = array("i", [-1] * 4) if i % 3 == 2 else None
        rows += [
            ChoiceRow(len(rows) + j, one.end + j, sampling, None if counts is None else counts.entries, mask)
            for j in range(1 + len(one.drafts))
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", nargs="+", default=[*PLAIN, *PACKED])
    parser.add_argument(
        "--layers", type=int, nargs="+", help="say only what a dry run of a model with so many launches"
    )
    options = parser.parse_args()
    pilotlight.engine.execution.decode_graphs.WANTED_TIMES = 2
    pilotlight.engine.execution.runner.CudaRecorder = NotingRecorder  # type: ignore[attr-defined]  # replaced where it is called

    class NoDevice:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(NoDevice())
    if options.layers:
        runs = {
            name: [dry_run_launches(dry_run_of(name, layers)) for layers in options.layers] for name in options.only
        }
        print(json.dumps({name: {"launches": [len(launches) for launches in found]} for name, found in runs.items()}))
        return
    found = {}
    for name in options.only:
        dry = dry_run_of(name)
        known = dry_run_launches(dry)
        with HostWaits() as waits:
            NotingRecorder.waits = waits
            real = trace_launches(lambda dry=dry: run_steps(dry))  # type: ignore[misc]
        variants = {launch.variant for launch in known}
        found[name] = {
            "known": len(distinct(known)),
            "launched": len({launch.variant for launch in real}),
            "new": [str(launch.variant) for launch in distinct(real) if launch.variant not in variants],
            "never": [str(v) for v in sorted(variants - {launch.variant for launch in real}, key=str)],
            "waits": +waits.counted,  # only those above zero
            "copies": waits.num_copies,
            "compiled": compile_launches(known).num_variants if options.compile else None,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
