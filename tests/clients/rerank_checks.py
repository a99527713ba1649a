"""Shared parts of the programs that check reranker clients: documents and their expected order."""

import json
import urllib.request
from collections.abc import Callable

import harness
from harness import ROUTER, expect

RANKER = "ranker"
QUERY = "What burns on a gas stove?"
DOCUMENTS = [
    "The pilot light burns small and blue.",
    "Lisbon has an airport.",
    "A lake lies between two mountains, and no one swims in it before June.",
    "Gas stoves burn gas; the flame of a pilot light stays on.",
]
LONG = "word " * 6000  # longer than the context of 4,096 tokens

Rank = Callable[[str, list[str], int], list[tuple[int, float]]]  # query, documents, top n -> (index, score)


def scores(query: str, documents: list[str]) -> list[float]:
    """Return the scores of the documents from the score API, without a client library."""
    body = json.dumps({"model": RANKER, "text_1": query, "text_2": documents}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {harness.KEY}"}
    with urllib.request.urlopen(urllib.request.Request(f"{ROUTER}/v1/score", body, headers), timeout=30) as answer:
        return [item["score"] for item in json.load(answer)["data"]]


def expect_order(rank: Rank) -> None:
    """Check that all documents are returned, the best first, with the same scores as from the score API."""
    expected = sorted(enumerate(scores(QUERY, DOCUMENTS)), key=lambda item: -item[1])
    found = rank(QUERY, DOCUMENTS, len(DOCUMENTS))
    expect([index for index, _ in found] == [index for index, _ in expected], (found, expected))
    expect(all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(found, expected, strict=True)), (found, expected))


def expect_top(rank: Rank) -> None:
    best, all_of_them = rank(QUERY, DOCUMENTS, 2), rank(QUERY, DOCUMENTS, len(DOCUMENTS))
    expect([index for index, _ in best] == [index for index, _ in all_of_them[:2]], (best, all_of_them))
