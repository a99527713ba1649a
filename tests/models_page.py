"""The writer of docs/models.md: the models that run, from the registry, the tests' checkpoints and the plans of published models. `python -m
tests.models_page`
writes it; tests/engine/planning/test_published_models.py fails while it is stale.
"""

import json
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.config_registry import PAGE, READERS
from pilotlight.engine.gguf.architectures import READ as GGUF
from pilotlight.engine.planning.model_plan import plan_model

ROOT = Path(__file__).parents[1]
PLANNING = ROOT / "tests" / "engine" / "planning"
HEAD = """# Supported models

A checkpoint runs if the first table has the class that its `config.json` names under `architectures`. `pilotlight plan DIRECTORY` checks this with
that file only, before anything is downloaded, and refuses another class by name. This page is written by `python -m tests.models_page`.

*Checkpoints*: the number of tiny checkpoints, of awkward sizes, that `transformers` 5.23 writes and the tests load; every log-probability is within
1e-4 of that of `transformers` in fp32. Decoders are tested along every path of [tests/README.md](../tests/README.md): whole, in chunks, in a batch,
after a cached prefix, after preemption, and through host memory and disk; classes that end in ForConditionalGeneration in chunks and in a batch.
*Ranks*: several ranks give the answers of one, divided by tensors, layers and, if there are any, experts. *GGUF*: files of llama.cpp are read;
"text" if the file of a vision tower is refused.

Weights may be quantized as FP8 (ModelOpt's, too), GPTQ, AWQ or by compressed-tensors, those of gpt-oss as MXFP4. GPTQ and AWQ are refused by name
for Phi and GLM-4, which store several projections in one tensor.

"""
REMARKS = {
    "Gemma4ForCausalLM": "models whose layers have inputs besides hidden states (E2B, E4B) run in one pipeline stage",
    "Gemma4ForConditionalGeneration": "text and pictures; models whose layers have inputs besides hidden states (E2B, E4B) run in one pipeline stage",
    "Gemma3ForConditionalGeneration": "text and pictures, without pan and scan",
    "Phi4MMForCausalLM": "text; pictures and sound are refused",
    "Phi4MultimodalForCausalLM": "text; pictures and sound are refused",
    "Qwen3OmniMoeForConditionalGeneration": "text; pictures, sound and speech are refused",
    "GptOssForCausalLM": "plain or MXFP4",
    "KimiK25ForConditionalGeneration": "text and pictures",
    "Llama4ForConditionalGeneration": "text and pictures",
    "Mistral3ForConditionalGeneration": "text and pictures; of Mistral Small 4 text alone",
    "Qwen3_5ForCausalLM": "files of llama.cpp with several value heads per key head run on one rank",
    "Qwen3_5MoeForCausalLM": "files of llama.cpp with several value heads per key head run on one rank",
    "NemotronHForCausalLM": "without layers that predict further tokens; steps of Mamba-2 have no lower limit, as in the published code",
    "Phi3ForCausalLM": "of its two lists of rotary factors, the long one is used at every length",
}


_QWEN_VISION = "text and pictures, of at most 16,384 patches: larger ones are shrunk further than elsewhere"


# The classes whose files of llama.cpp are read as those of one class.
_IN_FILES = {
    "Glm4MoeForCausalLM": ("Glm4MoeForCausalLM", "SolarOpenForCausalLM"),
    "BertModel": ("BertModel", "RobertaModel", "XLMRobertaModel"),
    "Gemma3ForCausalLM": ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
    "Gemma4ForCausalLM": ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    "Qwen3_5ForCausalLM": ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    "Qwen3_5MoeForCausalLM": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    "BertForSequenceClassification": ("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"),
}


class Published(NamedTuple):
    name: str
    architecture: str
    refusal: str | None  # None if it is accepted


def published() -> list[Published]:
    """Return for each listed model whether `plan` accepts it: by its published config if the tests have a copy, else by the default config of its
    class."""
    rows = [line.split("\t") for line in (PLANNING / "published_models.tsv").read_text().splitlines()[1:]]
    return [Published(name, architecture, _refusal(name, architecture)) for name, architecture in rows]


def _refusal(name: str, architecture: str) -> str | None:
    try:
        plan_model(_configuration(name, architecture))
    except CheckpointError as error:
        return str(error).removeprefix(f"config.json names architecture {architecture}, which is ")
    return None


# Models with a copy of the published config: the default config of their class describes another model, or none.
_AT_HAND = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama-4-scout",
    "deepseek-ai/DeepSeek-R1": "deepseek-r1",
    "moonshotai/Kimi-K2.5": "kimi-k2.5-int4",
}
# Published classes whose defaults are those of one of transformers.
_CLASSES = {"Phi4MMForCausalLM": "Phi4MultimodalForCausalLM"}
# Sizes of the published config.json, where they differ from the defaults of the class.
GEMMA4: dict[str, dict[str, Any]] = {
    "E2B": {
        "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    },
    "E4B": {
        "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 7,
    },
    "26B-A4B": {
        "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "num_global_key_value_heads": 2, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
        "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    },
}  # fmt: skip
_CHANGES: dict[str, dict[str, Any]] = {
    **{f"google/gemma-4-{name}-it": sizes | {"per_layer_config": None} for name, sizes in GEMMA4.items()},
    "rednote-hilab/dots.llm1.inst": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "zai-org/GLM-4.5-Air": {"head_dim": 128},
    "zai-org/GLM-4.6V": {"head_dim": 128},
    "google/gemma-4-31B-it": {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True},
}
_TOWERS = {"google/gemma-3-27b-it": {"image_size": 896, "patch_size": 14}}
_TEXTS = {
    "mistralai/Ministral-3-8B-Instruct": "Ministral3Config",
    "mistralai/Devstral-Small-2": "Ministral3Config",
    "zai-org/GLM-4.6V": "Glm4vMoeTextConfig",
}


def _configuration(name: str, architecture: str) -> dict[str, Any]:
    if name in _AT_HAND:
        config: dict[str, Any] = json.loads((PLANNING / "configs" / f"{_AT_HAND[name]}.json").read_text())
        return config
    of_class = getattr(transformers, _CLASSES.get(architecture, architecture), None)
    config = {} if of_class is None else of_class.config_class().to_dict()
    if name in _TEXTS:
        config["text_config"] = getattr(transformers, _TEXTS[name])().to_dict()
    changed = config.get("text_config") or config
    changed |= _CHANGES.get(name, {})
    if name in _TOWERS:
        config["vision_config"] |= _TOWERS[name]
    if name == "Qwen/Qwen3-Omni-30B-A3B-Instruct":
        config["thinker_config"]["text_config"]["head_dim"] = 128
    if "out_hidden_size" in (config.get("vision_config") or {}):  # its default does not fit the decoder
        config["vision_config"]["out_hidden_size"] = changed["hidden_size"]
    return config | {"architectures": [architecture]}


# By the start of a checkpoint's name in tests/engine/pictures.py; the first that fits.
_WITH_IMAGES = {
    "gemma 3": "Gemma3ForConditionalGeneration",
    "gemma 4": "Gemma4ForConditionalGeneration",
    "llama 4": "Llama4ForConditionalGeneration",
    "kimi": "KimiK25ForConditionalGeneration",
    "qwen 2.5 vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen 3 vl, experts": "Qwen3VLMoeForConditionalGeneration",
    "qwen 3 vl": "Qwen3VLForConditionalGeneration",
    "qwen 3.5, experts": "Qwen3_5MoeForConditionalGeneration",
    "qwen 3.5": "Qwen3_5ForConditionalGeneration",
    "mistral 3": "Mistral3ForConditionalGeneration",
    "glm 4.1": "Glm4vForConditionalGeneration",
    "glm 4.5": "Glm4vMoeForConditionalGeneration",
    "glm 4.6": "Glm46VForConditionalGeneration",
}


@cache
def _proofs() -> dict[str, list[str]]:
    """Return the names of the tiny checkpoints, by the class in their config.json."""
    from tests.embedders import EMBEDDERS
    from tests.engine.families import FURTHER, MODELS
    from tests.engine.pictures import FAMILIES as WITH_IMAGES
    from tests.engine.vision.test_text_beside_towers import MODELS as BESIDE_TOWERS

    found: dict[str, list[str]] = {}
    for names, rows in (
        (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODELS | FURTHER),
        (MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, BESIDE_TOWERS),
    ):
        for row, config in rows.items():
            found.setdefault(_architecture(names, config), []).append(row)
    for row, embedder in EMBEDDERS.items():
        if embedder.is_encoder:
            found.setdefault(_architecture(MODEL_MAPPING_NAMES, embedder.config), []).append(row)
    for row in WITH_IMAGES:
        found.setdefault(next(name for start, name in _WITH_IMAGES.items() if row.startswith(start)), []).append(row)
    return found


def _architecture(names: Any, config: PreTrainedConfig) -> str:
    name = names.get(config.model_type, f"{type(config).__name__.removesuffix('Config')}ForCausalLM")
    return str(name if isinstance(name, str) else name[0])


@cache
def _of_ranks() -> set[str]:
    from tests.engine.parallel.test_compositions import FURTHER, MODELS

    return {_architecture(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, kind()) for kind, _ in (MODELS | FURTHER).values()}


def _models(place: str) -> str:
    """Return the names of the models that a reader of config.json supports, taken from the start of its docstring or that of its module."""
    module_name, _, function = place.partition(":")
    module = import_module(f"pilotlight.engine.description.families.{module_name}")
    described = getattr(module, function).__doc__ if function else module.__doc__
    words = " ".join(str(described).split())
    named = re.split(r": |\.(?: |$)", words)[0].removeprefix("The config of ")
    return re.split(r"'s? config\b", named)[0]


def _of_gguf(name: str, place: str) -> str:
    """Return what of a class GGUF files can have. A class with a tower shares its reader of config.json with that of its decoder."""
    names = {of for each in GGUF.values() for of in _IN_FILES.get(each.architecture, (each.architecture,))}
    # these read the classes of Mistral and Mistral 4, and DeepSeek-V3's
    places = {READERS[each] for each in (*names, "Mistral3ForConditionalGeneration", "KimiK25ForConditionalGeneration")}
    if name not in names and (place not in places or name.endswith(("Model", "SequenceClassification"))):
        return "-"
    return "text" if name.endswith("ForConditionalGeneration") else "yes"


def render() -> str:
    proofs, ranks = _proofs(), _of_ranks()
    lines = ["| class | models | checkpoints | ranks | GGUF | remarks |", "|---|---|:-:|:-:|:-:|---|"]
    for name, place in sorted(READERS.items()):
        remark = (
            _QWEN_VISION
            if place.startswith("grid_vision")
            else REMARKS.get(name, "text; pictures are refused" if name.endswith("ForConditionalGeneration") else "")
        )
        count = len(proofs.get(name, ())) or "-"
        cells = ("yes" if name in ranks else "-", _of_gguf(name, place), remark)
        lines.append(f"| {name} | {_models(place)} | {count} | {' | '.join(cells)} |")
    rows = published()
    accepted = sum(row.refusal is None for row in rows)
    lines += [
        "", "## Published models", "",
        f"Of these {len(rows)}, `pilotlight plan` accepts {accepted} by their class.", "",
        "| model | class | runs |", "|---|---|---|",
        *(f"| {row.name} | {row.architecture} | {'yes' if row.refusal is None else row.refusal} |" for row in rows),
    ]  # fmt: skip
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    (ROOT / PAGE).write_text(render(), encoding="utf-8")
