"""A model's launches are known without its weights, compiled without a GPU, and found in the cache later; a layer has few.

The test runs a separate process that compiles for Hopper (sm_90), with a driver that has no device; in this process Triton interprets.
"""

import json
import re
from typing import Any

import pytest

from tests.kernels.triton.conftest import ROOT, run_compiling

pytest.importorskip("triton")

pytestmark = [pytest.mark.cpu_only, pytest.mark.timeout(900)]  # its cache is always empty

SCRIPT = """
import json, os
from collections import Counter
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from pilotlight.engine.loading import dry_run
from pilotlight.engine.execution.context import Context
from pilotlight.engine.models.model_registry import FAMILIES
from pilotlight.engine.loading.dry_run import DryRun, decode_batch, dry_run_launches
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.formats.weight_formats import read_format
from pilotlight.engine.weights.bundles.bundle import TensorSpec
from pilotlight.engine.weights.storage import MetaStorage
from pilotlight.kernels.warm_up import compile_launches, distinct, fake_tensor, trace_launches

class NoDevice:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(NoDevice())

def llama_of(layers, pooling=None):
    config = llama.parse_config(dict(
        architectures=["LlamaForCausalLM"], hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        vocab_size=128256, num_hidden_layers=layers, intermediate_size=14336, max_position_embeddings=8192,
    ))
    layout = CacheLayout(config.cached_layers, 16, torch.bfloat16)
    return DryRun(llama, config, MetaStorage([]), torch.bfloat16, 8192, layout, pooling)

class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operators = Counter()
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))

def launches_of(layers):
    its = llama_of(layers)
    counting = Counting()
    def run():
        model = llama.load(its.config, WeightLoader(its.storage, its.dtype, torch.device("meta")), its.context_length)
        cache = its.layout.views(fake_tensor((64, its.layout.block_bytes), torch.uint8))
        with counting:
            model.forward(Context(decode_batch(1, 4000, 16), cache))
    noted = trace_launches(run)
    return counting.operators + Counter(f"triton {launch.function.__name__}" for launch in noted)

bert, llama, mistral, qwen3 = (FAMILIES[name] for name in ("BertModel", "LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"))
SMALL = dict(
    hidden_size=96, num_attention_heads=6, num_key_value_heads=2, head_dim=16, vocab_size=301, num_hidden_layers=2, intermediate_size=130,
    max_position_embeddings=512,
)

def names(family, pooling=None, **more):
    config = family.parse_config(SMALL | more)
    layout = CacheLayout(config.cached_layers, 16 if config.cached_layers else 512, torch.float16)
    noted = dry_run_launches(DryRun(family, config, MetaStorage([]), torch.float16, 512, layout, pooling))
    return sorted({launch.function.__name__ for launch in noted})

def formats(parts, method):
    format = read_format({"quantization_config": method})
    config = llama.parse_config(SMALL | dict(intermediate_size=160))
    layout = CacheLayout(config.cached_layers, 16, torch.float16)
    its = DryRun(llama, config, MetaStorage(stored_as(parts)), torch.float16, 512, layout, None, format, True)
    launches = dry_run_launches(its)
    assert {"_attend", "_rms_norm", "_rotate_and_cache", "_gated", "_pick"} <= {launch.function.__name__ for launch in launches}
    products = [launch for launch in launches if launch.function.__name__ == "_multiply"]
    kinds = {(launch.function.__module__, launch.options.get("FORMAT"), launch.options.get("HAS_ZEROS")) for launch in products}
    return sorted([module.rpartition(".")[2], str(kind), zeros] for module, kind, zeros in kinds)

MATRICES = {
    "self_attn.q_proj": (96, 96), "self_attn.k_proj": (32, 96), "self_attn.v_proj": (32, 96), "self_attn.o_proj": (96, 96),
    "mlp.gate_proj": (160, 96), "mlp.up_proj": (160, 96), "mlp.down_proj": (96, 160),
}

def stored_as(parts):
    return [
        TensorSpec(f"model.layers.{i}.{name}.{part}", *stored)
        for i in range(2) for name, (rows, columns) in MATRICES.items() for part, stored in parts(rows, columns).items()
    ]

def in_int4(rows, columns):
    return {
        "qweight": ("I32", (columns // 8, rows)), "qzeros": ("I32", (columns // 32, rows // 8)),
        "scales": ("F16", (columns // 32, rows)),
    }

def in_fp8(rows, columns):
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", (rows, 1))}

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}

found = {"layer": launches_of(3) - launches_of(2)}
two_groups = dict(use_sliding_window=True, sliding_window=40, max_window_layers=1)
found["families"] = [names(qwen3), names(mistral, sliding_window=40), names(qwen3, **two_groups), names(bert, "cls")]
found["packed"] = [formats(in_int4, GPTQ), formats(in_int4, GPTQ | {"sym": False}), formats(in_fp8, {"quant_method": "fp8"})]
known = dry_run_launches(llama_of(2)) + dry_run_launches(llama_of(2, "mean"))
dry_run.DECODES, dry_run.PROMPTS = ((1, 200), (2, 33), (5, 1600), (128, 700), (96, 8000)), ((1,), (7, 100), (1000,), (16, 16))
again = dry_run_launches(llama_of(2)) + dry_run_launches(llama_of(2, "mean"))
variants = {launch.variant for launch in known}
found["new at other lengths"] = [str(launch.variant) for launch in distinct(again) if launch.variant not in variants]
found["functions"] = sorted({launch.function.__name__ for launch in known})
cache = os.environ["TRITON_CACHE_DIR"]
some = [launch.variant for launch in distinct(known)[::4]]  # the slow sweep of tests/engine/test_variants.py compiles all
found["some"] = len(some)
known, again = ([launch for launch in launches if launch.variant in some] for launches in (known, again))
found["compiled"] = compile_launches(known).num_variants
files = sorted(os.listdir(cache))
for launch in known:
    launch.function.device_caches.clear()
compile_launches(again)
found["files"], found["files more"] = len(files), len(os.listdir(cache)) - len(files)
print(json.dumps(found))
"""

# Torch operations without a launch: allocations, and views.
NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "view", "_unsafe_view", "reshape", "slice", "select", "transpose", "t",
             "unsqueeze", "unflatten", "detach",
             "expand", "permute", "alias", "split", "unbind", "as_strided"}  # fmt: skip
GEMMS = {"mm", "addmm", "linear", "bmm"}


@pytest.fixture(scope="module")
def found(process_tier: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = str(tmp_path_factory.mktemp("cache"))
    printed = run_compiling(SCRIPT, TRITON_CACHE_DIR=cache, PILOTLIGHT_TRITON="1")
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def test_what_a_model_launches_is_compiled_before(found: dict[str, Any]) -> None:
    assert {"_attend", "_rms_norm", "_gated", "_rotate_and_cache", "_tops", "_pick", "_pool"} <= {*found["functions"]}
    assert found["compiled"] == found["files"] == found["some"] > 5


def test_no_length_asks_for_another_variant(found: dict[str, Any]) -> None:
    assert found["new at other lengths"] == []
    assert found["files more"] == 0, "compiled kernels are found in the cache"


def test_a_dense_layer_makes_six_launches_beside_its_products(found: dict[str, Any]) -> None:
    layer = {name: count for name, count in found["layer"].items() if name not in NO_LAUNCH}
    products = sum(layer.pop(name, 0) for name in GEMMS)
    assert products == 4, "queries, keys and values; output; gate and up; down"
    assert sum(layer.values()) <= 6, layer


def test_other_families_have_their_launches_too(found: dict[str, Any]) -> None:
    normed, windowed, mixed, encoder = found["families"]
    assert {"_attend", "_rms_norm", "_rotate_and_cache", "_gated", "_pick"} <= {*normed}
    assert {*windowed} == {*normed} - {"_join"}, "a short window is not split"
    assert mixed == normed, "layers of both kinds, each with a block table"
    assert encoder == ["_pool"], "torch computes the other parts of an encoder"


def test_a_dry_run_keeps_packed_matrices_packed(found: dict[str, Any]) -> None:
    symmetric, asymmetric, fp8 = found["packed"]
    assert ["packed", "2", False] in symmetric, "INT4 is format 2"
    assert ["packed", "2", True] not in symmetric
    assert ["packed", "2", True] in asymmetric
    assert [module for module, _, _ in fp8 if module == "fp8_linear"]


def test_every_triton_function_can_be_rehearsed() -> None:
    """A function with Triton's own decorator would run in a dry run, on tensors that do not exist."""
    others = [
        path.name
        for path in (ROOT / "kernels/triton").glob("*.py")
        if re.search(r"^@triton\.jit", path.read_text(), re.M)
    ]
    assert not others, "decorate them with jit of kernels/triton/jit.py, which takes `of_batch`"
