"""cohere: rerank in both versions of its API."""

from functools import partial
from typing import Any

import cohere
import harness
from harness import expect
from rerank_checks import DOCUMENTS, LONG, QUERY, RANKER, Rank, expect_order, expect_top

first = cohere.Client(harness.KEY, base_url=harness.ROUTER)
second = cohere.ClientV2(harness.KEY, base_url=harness.ROUTER)


def ranked_by(client: Any) -> Rank:
    def rank(query: str, documents: list[str], top_n: int) -> list[tuple[int, float]]:
        answer = client.rerank(model=RANKER, query=query, documents=documents, top_n=top_n)
        return [(result.index, result.relevance_score) for result in answer.results]

    return rank


def rerank() -> None:
    for client in (first, second):
        expect_order(ranked_by(client))
    documents = [{"text": text} for text in DOCUMENTS]
    answer = first.rerank(model=RANKER, query=QUERY, documents=documents, return_documents=True)
    expect(all(result.document.text == DOCUMENTS[result.index] for result in answer.results), answer)


def top() -> None:
    for client in (first, second):
        expect_top(ranked_by(client))


def long_documents() -> None:
    cut = second.rerank(model=RANKER, query=QUERY, documents=[*DOCUMENTS, LONG])
    expect(len(cut.results) == len(DOCUMENTS) + 1, cut)
    harness.expect_raised(
        cohere.BadRequestError,
        lambda: first.rerank(model=RANKER, query=QUERY, documents=[LONG]),
        "documents[0]",
        "truncate",
    )


def errors() -> None:
    for client in (first, second):
        asked = partial(client.rerank, query=QUERY, documents=DOCUMENTS)
        harness.expect_raised(cohere.NotFoundError, partial(asked, model="nope"), "nope")
        harness.expect_raised(cohere.BadRequestError, partial(asked, model=harness.CHAT), "scores no texts")


if __name__ == "__main__":
    harness.main("cohere", {"rerank": rerank, "top n": top, "long documents": long_documents, "errors": errors})
