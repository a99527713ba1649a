"""LlamaIndex: the rerankers of Cohere and Jina, as postprocessors of nodes."""

from collections.abc import Callable

import cohere
import harness
from harness import expect
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from rerank_checks import DOCUMENTS, QUERY, RANKER, Rank, expect_order, expect_top


def of_cohere(model: str, top_n: int) -> BaseNodePostprocessor:
    return CohereRerank(model=model, top_n=top_n, api_key=harness.KEY, base_url=harness.ROUTER)


def of_jina(model: str, top_n: int) -> BaseNodePostprocessor:
    return JinaRerank(model=model, top_n=top_n, api_key=harness.KEY, base_url=harness.OPENAI_URL)


def rank_by(made: Callable[[str, int], BaseNodePostprocessor]) -> Rank:
    def rank(query: str, documents: list[str], top_n: int) -> list[tuple[int, float]]:
        nodes = [NodeWithScore(node=TextNode(text=text, id_=str(i))) for i, text in enumerate(documents)]
        found = made(RANKER, top_n).postprocess_nodes(nodes, QueryBundle(query))
        return [(int(node.node.node_id), float(node.score or 0.0)) for node in found]

    return rank


def rerank() -> None:
    for made in (of_cohere, of_jina):
        expect_order(rank_by(made))


def top() -> None:
    for made in (of_cohere, of_jina):
        expect_top(rank_by(made))


def errors() -> None:
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS]
    nobody = of_cohere("nope", 2)
    harness.expect_raised(cohere.NotFoundError, lambda: nobody.postprocess_nodes(nodes, QueryBundle(QUERY)), "nope")
    # Jina's class reads the field `detail` of Jina's errors, and raises a KeyError if an error lacks it.
    raised = harness.expect_raised(KeyError, lambda: of_jina("nope", 2).postprocess_nodes(nodes, QueryBundle(QUERY)))
    expect("detail" in str(raised), raised)


if __name__ == "__main__":
    long_documents = "see the cohere client, which it calls"
    harness.main(
        "llama-index-postprocessor-jinaai-rerank",
        {"rerank": rerank, "top n": top, "long documents": long_documents, "errors": errors},
    )
