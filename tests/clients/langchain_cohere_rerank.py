"""LangChain: CohereRerank of langchain-cohere."""

import cohere
import harness
from harness import expect
from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from rerank_checks import DOCUMENTS, LONG, QUERY, RANKER, expect_order, expect_top

MODEL = {"cohere_api_key": harness.KEY, "base_url": harness.ROUTER}


def rank(query: str, documents: list[str], top_n: int) -> list[tuple[int, float]]:
    found = CohereRerank(model=RANKER, **MODEL).rerank(documents, query, top_n=top_n)
    return [(item["index"], item["relevance_score"]) for item in found]


def rerank() -> None:
    expect_order(rank)
    documents = [Document(page_content=text, metadata={"number": i}) for i, text in enumerate(DOCUMENTS)]
    kept = CohereRerank(model=RANKER, top_n=2, **MODEL).compress_documents(documents, QUERY)
    best = rank(QUERY, DOCUMENTS, 2)
    expect([(found.metadata["number"], found.metadata["relevance_score"]) for found in kept] == best, kept)


def top() -> None:
    expect_top(rank)


def long_documents() -> None:
    expect(len(rank(QUERY, [*DOCUMENTS, LONG], 5)) == 5, "a long document is cut")


def errors() -> None:
    nobody = CohereRerank(model="nope", **MODEL)
    harness.expect_raised(cohere.NotFoundError, lambda: nobody.rerank(DOCUMENTS, QUERY), "nope")


if __name__ == "__main__":
    harness.main(
        "langchain-cohere", {"rerank": rerank, "top n": top, "long documents": long_documents, "errors": errors}
    )
