"""Tiny random checkpoints that score texts and pairs of texts, in the layouts of transformers and sentence-transformers, and their logits by
transformers."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    RobertaConfig,
)

from pilotlight.engine.api.protocol import Activation, Pooling
from tests.checkpoints import AWKWARD
from tests.embedders import (
    BERT,
    BERT_OF_FIVE_HEADS,
    MODERN_BERT,
    MODERN_BERT_OF_BIASES,
    XLM_ROBERTA,
    XLM_ROBERTA_OF_FIVE_HEADS,
)

_DECODER = {key: value for key, value in AWKWARD.items() if value is not None}
YES, NO = 17, 23  # the tokens by which a judge answers
ROBERTA = RobertaConfig(
    **{**XLM_ROBERTA.to_dict(), "model_type": "roberta", "architectures": None, "type_vocab_size": 1}
)


class Classifier(NamedTuple):
    config: PreTrainedConfig
    pooling: Pooling
    num_labels: int = 1
    is_judge: bool = False  # a causal model; its score is the logit of YES minus that of NO

    @property
    def tells_texts_apart(self) -> bool:
        return type(self.config) is BertConfig

    @property
    def is_decoder(self) -> bool:
        return isinstance(self.config, LlamaConfig | Qwen3Config)

    @property
    def activation(self) -> Activation:
        return "sigmoid" if self.num_labels == 1 else "softmax"


CLASSIFIERS: dict[str, Classifier] = {
    "bert": Classifier(BERT, "cls"),
    "bert, three classes": Classifier(BERT_OF_FIVE_HEADS, "cls", 3),
    "roberta, two classes": Classifier(ROBERTA, "cls", 2),
    "xlm-roberta": Classifier(XLM_ROBERTA_OF_FIVE_HEADS, "cls"),
    "modernbert": Classifier(MODERN_BERT, "cls"),
    "modernbert with biases, mean": Classifier(MODERN_BERT_OF_BIASES, "mean", 4),
    "qwen3": Classifier(Qwen3Config(**_DECODER), "last"),
    "llama, five classes": Classifier(LlamaConfig(**_DECODER), "last", 5),
    "qwen3, yes or no": Classifier(Qwen3Config(**_DECODER), "last", is_judge=True),
    "qwen3, tied, yes or no": Classifier(
        Qwen3Config(**_DECODER | {"tie_word_embeddings": True}), "last", is_judge=True
    ),
}


def write_classifier(directory: Path, classifier: Classifier) -> PreTrainedModel:
    """Write the checkpoint and return its model. A judge also gets the module files of sentence-transformers."""
    config = deepcopy(classifier.config)
    config.id2label = {i: f"LABEL_{i}" for i in range(classifier.num_labels)}
    auto = AutoModelForCausalLM if classifier.is_judge else AutoModelForSequenceClassification
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name.lower() or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    if classifier.is_judge:
        write_score_modules(directory, {"true_token_id": YES, "false_token_id": NO})
    return model


def write_score_modules(directory: Path, config: dict[str, Any]) -> None:
    kinds = [
        ("", "base.modules.transformer.Transformer"),
        ("1_LogitScore", "cross_encoder.modules.logit_score.LogitScore"),
    ]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_LogitScore").mkdir(exist_ok=True)
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(config))


@torch.inference_mode()
def reference_logits(
    model: PreTrainedModel, classifier: Classifier, prompt: list[int], second_from: int = 0
) -> torch.Tensor:
    """Return the logits of the classes, [num_labels].

    `second_from`: the index of the second text's first token, for a model with token types; 0 means a single text.
    """
    inputs = {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}
    if classifier.tells_texts_apart:
        second = second_from or len(prompt)
        inputs["token_type_ids"] = torch.tensor([[int(place >= second) for place in range(len(prompt))]])
    logits = model(**inputs).logits[0]
    return logits[-1, YES : YES + 1] - logits[-1, NO : NO + 1] if classifier.is_judge else logits
