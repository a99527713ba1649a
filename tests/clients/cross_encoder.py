"""sentence-transformers: a CrossEncoder with the files of the site's reranker, and the scores of the site."""

import os

import harness
import torch
from harness import expect
from rerank_checks import DOCUMENTS, QUERY, expect_order, scores
from sentence_transformers import CrossEncoder

model = CrossEncoder(os.environ["PILOTLIGHT_RANKER_FILES"], device="cpu", model_kwargs={"dtype": torch.float32})


def rank(query: str, documents: list[str], top_n: int) -> list[tuple[int, float]]:
    found = model.rank(query, documents, top_k=top_n, batch_size=1)
    return [(item["corpus_id"], float(item["score"])) for item in found]


def rerank() -> None:
    """Check that library and site give the same order, and the same scores within 1e-4."""
    expect_order(rank)


def pairs() -> None:
    texts = [*DOCUMENTS, "", "a", "Ümlaute and \u65e5\u672c\u8a9e"]
    expected = model.predict([(QUERY, text) for text in texts], batch_size=1).tolist()
    found = scores(QUERY, texts)
    expect(max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-4, (expected, found))
    expect(max(found) - min(found) > 5e-3, f"the scores do not distinguish the texts: {found}")


if __name__ == "__main__":
    harness.main("sentence-transformers", {"rerank": rerank, "pairs": pairs})
