"""Rerankers from tiny checkpoints through a router and a site: the scores are those that transformers computes for the same tokens."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import PreTrainedModel

from load_tests.local_network import LocalNetwork
from tests.checkpoints import write_tokenizer
from tests.classifiers import CLASSIFIERS, reference_logits, write_classifier
from tests.e2e.conftest import NO_STANDBY

NAMES = {"bert": "bert", "modernbert": "modernbert", "judge": "qwen3, yes or no"}
QUERY = "what burns"
DOCUMENTS = ["the pilot light", "of a gas stove " * 3, "somebody wants warm water or a hot meal"]  # data
JUDGING = (
    "<|im_start|>{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>"
)


class Rerankers(NamedTuple):
    network: LocalNetwork
    folder: Path
    models: dict[str, PreTrainedModel]

    def expected(self, name: str) -> list[float]:
        """Return the scores of all documents as transformers computes them."""
        classifier, tokenizer = (
            CLASSIFIERS[NAMES[name]],
            Tokenizer.from_file(str(self.folder / name / "tokenizer.json")),
        )
        scores = []
        for document in DOCUMENTS:
            if classifier.is_judge:
                ids, second = tokenizer.encode(f"<|im_start|>{QUERY}\n{document}<|im_end|>").ids, 0
            else:
                encoding = tokenizer.encode(QUERY, document)
                ids, second = encoding.ids, encoding.type_ids.index(1)
            scores.append(torch.sigmoid(reference_logits(self.models[name], classifier, ids, second)).item())
        return scores


@pytest.fixture(scope="module")
def rerankers() -> Iterator[Rerankers]:
    with tempfile.TemporaryDirectory(prefix="rerankers-") as folder:
        models = {}
        for name, kind in NAMES.items():
            directory = Path(folder) / name
            models[name] = write_classifier(directory, CLASSIFIERS[kind])
            write_tokenizer(directory)
            if CLASSIFIERS[kind].is_judge:
                (directory / "chat_template.jinja").write_text(JUDGING)
            else:
                with_separators(directory / "tokenizer.json")
                without_template(directory / "tokenizer_config.json")
        source = "".join(f'\n[[models]]\nname = "{name}"\nsource = "{folder}/{name}"\n' for name in NAMES)
        with LocalNetwork(num_sites=1, site_settings=source, engine_settings=NO_STANDBY) as running:
            yield Rerankers(running, Path(folder), models)


def without_template(file: Path) -> None:
    """Remove the chat template, so that the tokenizer joins query and document: otherwise the template would."""
    config = json.loads(file.read_text())
    del config["chat_template"]
    file.write_text(json.dumps(config))


def with_separators(file: Path) -> None:
    """Make the tokenizer join two texts as that of BERT does."""
    tokenizer = Tokenizer.from_file(str(file))
    separator, first = ("<|im_end|>", 1), ("<|im_start|>", 2)
    assert tokenizer.token_to_id(separator[0]) == separator[1]
    tokenizer.post_processor = processors.BertProcessing(separator, first)
    tokenizer.save(str(file))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_have_the_scores_of_transformers(rerankers: Rerankers, name: str, path: str) -> None:
    asked = {"model": name, "query": QUERY, "documents": DOCUMENTS}
    answer = httpx.post(rerankers.network.url + path, json=asked, timeout=60).json()
    expected = rerankers.expected(name)
    assert [item["index"] for item in answer["results"]] == sorted(range(3), key=lambda i: -expected[i])
    for item in answer["results"]:
        assert abs(item["relevance_score"] - expected[item["index"]]) <= 1e-4


def test_pairs_contexts_and_logits_agree_with_them(rerankers: Rerankers) -> None:
    def ask(path: str, **body: Any) -> Any:
        return httpx.post(rerankers.network.url + path, json=body, timeout=60).json()

    for name in NAMES:
        expected = rerankers.expected(name)
        pairs = ask("/v1/score", model=name, text_1=QUERY, text_2=DOCUMENTS)["data"]
        assert [item["score"] for item in pairs] == pytest.approx(expected, abs=1e-4)
        contexts = [{"text": document} for document in DOCUMENTS]
        native = ask(f"/client/v4/accounts/a/ai/run/{name}", query=QUERY, contexts=contexts)["result"]["response"]
        assert {item["id"]: item["score"] for item in native} == pytest.approx(dict(enumerate(expected)), abs=1e-4)
        raw = ask("/rerank", model=name, query=QUERY, texts=DOCUMENTS, raw_scores=True)
        logits = {i: torch.logit(torch.tensor(score)).item() for i, score in enumerate(expected)}
        assert {item["index"]: item["score"] for item in raw} == pytest.approx(logits, abs=1e-3)


def test_a_router_lists_rerankers_as_such_and_refuses_them_a_chat(rerankers: Rerankers) -> None:
    listed = httpx.get(rerankers.network.url + "/v1/models", timeout=60).json()["data"]
    assert {model["id"]: model["type"] for model in listed if model["id"] in NAMES} == dict.fromkeys(NAMES, "rerank")
    chat = {"model": "bert", "messages": [{"role": "user", "content": "Hi"}]}
    refused = httpx.post(rerankers.network.url + "/v1/chat/completions", json=chat, timeout=60)
    assert refused.status_code == 400
    assert "scores texts and generates nothing" in json.loads(refused.content)["error"]["message"]
