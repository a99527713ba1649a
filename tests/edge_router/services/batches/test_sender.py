"""Requests of batches as they are sent: the key of each one, and repeated attempts."""

import json
from typing import Any, cast

import pytest

from pilotlight.edge_router.requests.request import Head
from pilotlight.edge_router.services.batches.batch_store import BatchLimits, StoredBatch, WaitingRequest
from pilotlight.edge_router.services.batches.sender import BatchAnswer, BatchSender
from pilotlight.wire.credentials import Access, Account, Key
from pilotlight.wire.errors import ApiError
from tests.edge_router.builders import Clock

NOW_S = 1000  # the time at which the clock of builders.py starts
MINE = Key("mine", "0" * 64, account=Account("acme"))


def waiting(key: str = "mine", owner: str = "acme", left_s: int = 60) -> WaitingRequest:
    batch = StoredBatch("batch_1", owner, key, "/v1/chat/completions", "file-1", NOW_S, NOW_S + left_s)
    return WaitingRequest(1, b"{}", batch)


class Made:
    """A sender whose requests get `answers`, one after the other. Its pauses take no time."""

    def __init__(self, *answers: tuple[int, float], keys: tuple[Key, ...] = (MINE,), door: bool = True) -> None:
        self.answers = list(answers)  # status and retry-after, in seconds, of each answer
        self.asked: list[BatchAnswer] = []
        self.slept: list[float] = []
        access = Access(keys, is_required=door, clock=Clock())
        self.sender = BatchSender(cast("Any", self), access, BatchLimits().first_wait_s, Clock(), self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    def forward(self, answer: BatchAnswer, body: bytes) -> BatchAnswer:
        return answer

    async def handle(self, client: BatchAnswer, work: BatchAnswer) -> None:
        self.asked.append(client)
        client.status, client.retry_after_s = self.answers[len(self.asked) - 1]


@pytest.mark.parametrize(
    ("answers", "status", "waits"),
    [
        ([(200, 0.0)], 200, []),
        ([(400, 0.0)], 400, []),
        ([(503, 0.0)] * 8 + [(200, 0.0)], 200, [1, 2, 4, 8, 16, 32, 60, 60]),
        ([(429, 5.0), (429, 1.0), (200, 0.0)], 200, [5, 2]),
        ([(500, 0.0)] * 3, 500, [1, 2]),
        ([(500, 0.0), (503, 0.0), (408, 0.0), (504, 0.0)], 504, [1, 2, 4]),
    ],
)
async def test_a_request_is_asked_again_with_ever_longer_pauses_and_seldom_where_sites_fail_at_it(
    answers: list[tuple[int, float]], status: int, waits: list[float]
) -> None:
    made = Made(*answers)
    assert (await made.sender.ask(waiting()))[0] == status
    assert made.slept == waits
    assert {each.request_id for each in made.asked} == {"batch_1.1"}, "billed once under its own name"


@pytest.mark.parametrize(
    ("keys", "door", "key", "refusal"),
    [
        ((MINE,), True, "mine", None),
        ((), False, "mine", "no longer exists"),
        ((MINE,), True, "other", "no longer exists"),
        ((MINE,), True, "", "this needs a key"),
        ((MINE,), False, "", None),
    ],
)
async def test_a_request_has_the_rights_that_its_key_has_now(
    keys: tuple[Key, ...], door: bool, key: str, refusal: str | None
) -> None:
    made = Made((200, 0.0), keys=keys, door=door)
    status, body = await made.sender.ask(waiting(key))
    if refusal is None:
        assert (status, made.asked[0].head.holder) == (200, MINE if key else None)
    else:
        assert (status, refusal in json.loads(body)["error"]["message"], made.asked) == (401, True, [])


@pytest.mark.parametrize(
    ("key", "owner", "authorization"),
    [("mine", "acme", None), ("", "anonymous", None), ("", "somebody", "Bearer batches-of-somebody")],
)
async def test_a_client_without_a_known_key_still_has_a_separate_prefix_cache(
    key: str, owner: str, authorization: str | None
) -> None:
    made = Made((200, 0.0), door=False)
    await made.sender.ask(waiting(key, owner))
    head = made.asked[0].head
    assert dict(head.headers).get("authorization") == authorization
    assert head.is_for_batch
    assert head.usage_id == made.asked[0].request_id


async def test_a_stream_is_no_answer_to_a_request_of_a_batch() -> None:
    answer = BatchAnswer(Head("POST", "/v1/completions", "/v1/completions", []), "batch_1.1")
    with pytest.raises(ApiError, match="answered a request of a batch with a stream"):
        await answer.start_stream(200, [])
    assert answer.status == 500
    await answer.refuse(ApiError("overloaded", "Full.", retry_after_s=7))
    assert (answer.status, answer.retry_after_s) == (503, 7)
