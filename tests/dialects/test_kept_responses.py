"""Kept responses are bounded in bytes and in time, the longest untouched make room, and one that is being made is never dropped."""

import asyncio
from typing import Any

from dialects.kept_responses import KeptResponse, ResponseStore
from wire.errors import ApiError


class Hours:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def kept(number: int, *, size: int = 1000, status: str = "completed", tenant: str = "t") -> KeptResponse:
    fields: dict[str, Any] = {
        "id": f"resp_{number}",
        "status": status,
        "output": [{"id": f"msg_{number}", "type": "message"}],
    }
    return KeptResponse(tenant, fields, (b"x" * size,), 0)


def there(store: ResponseStore, number: int) -> bool:
    try:
        return store.find(f"resp_{number}", "t").id == f"resp_{number}"
    except ApiError:
        return False


def size_of(*responses: KeptResponse) -> int:
    store = ResponseStore()
    for response in responses:
        store.keep(response)
    return store.num_bytes


def test_the_longest_untouched_make_room() -> None:
    size = size_of(kept(0))
    store = ResponseStore(max_bytes=3 * size)
    for number in range(3):
        store.keep(kept(number))
    assert there(store, 0)  # touched: so the second is the oldest now
    store.keep(kept(3))
    assert [there(store, number) for number in range(4)] == [True, False, True, True]
    assert store.item("msg_1", "t") is None
    assert store.item("msg_0", "t") is not None
    assert store.item("msg_0", "another") is None
    store.keep(kept(9, size=100 * size))
    assert [there(store, number) for number in (0, 2, 3, 9)] == [False] * 4, "what is larger than all of it is not kept"


def test_what_is_being_made_stays_and_what_is_too_old_goes() -> None:
    clock = Hours()
    store = ResponseStore(max_bytes=1, keep_s=10.0, clock=clock)
    store.keep(kept(0, status="in_progress"))
    assert there(store, 0)
    store = ResponseStore(keep_s=10.0, clock=clock)
    store.keep(kept(0))
    clock.now_s = 9.0
    assert there(store, 0)
    clock.now_s = 18.0
    assert there(store, 0), "it was touched"
    clock.now_s = 40.0
    assert not there(store, 0)
    assert len(store) == 0


def test_keeping_one_again_counts_it_once() -> None:
    store = ResponseStore(max_bytes=size_of(kept(0)) * 2)
    for _ in range(5):
        store.keep(kept(0))
    store.keep(kept(1))
    assert there(store, 0)
    assert there(store, 1)


async def test_a_reader_is_told_of_each_event_and_of_the_end() -> None:
    response = kept(0, status="in_progress")
    response.add_event(b"a")
    assert await response.after(0) == ([b"a"], False)
    response.end_as("failed", ApiError("engine_error", "it broke"))
    assert await response.after(0) == ([b"a"], True)
    assert await response.after(1) == ([], True)
    assert response.fields["error"] == {"code": "engine_error", "message": "it broke"}
    response.end_as("cancelled")
    assert response.fields["status"] == "failed", "it has ended once"


async def test_a_reader_that_waits_is_woken_by_the_next_event_and_by_the_end() -> None:
    response = kept(0, status="in_progress")
    for happen, told in (
        (lambda: response.add_event(b"a"), ([b"a"], False)),
        (lambda: response.end_as("cancelled"), ([], True)),
    ):
        reading = asyncio.create_task(response.after(len(response.events)))
        await asyncio.sleep(0)
        assert not reading.done()
        happen()
        async with asyncio.timeout(5):
            assert await reading == told
    assert (response.fields["status"], response.fields["error"]) == ("cancelled", None)


async def test_what_is_deleted_or_left_at_the_end_is_made_no_further() -> None:
    store, made = ResponseStore(), [kept(number, status="in_progress") for number in range(2)]
    for response in made:
        response.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        store.keep(response)
    store.delete(made[0])
    assert (store.has(made[0]), store.item("msg_0", "t"), store.has(made[1])) == (False, None, True)
    await store.close()
    assert [response.task is not None and response.task.cancelled() for response in made] == [True, True]


def test_all_that_is_kept_counts_in_bytes() -> None:
    plain, more = kept(0), kept(0)
    more.add_event(b"x" * 5000)
    assert size_of(more) - size_of(plain) == 5000 + 500
    assert size_of(kept(0, size=3000)) - size_of(plain) == 2000


def test_a_conversation_of_many_responses_is_kept_once_and_let_go_with_the_last() -> None:
    turns, items = list[KeptResponse](), tuple[bytes, ...]()
    for number in range(30):
        items = (*items, b"%04d" % number * 250)
        turns.append(KeptResponse("t", kept(number).fields, items, number))
    whole = size_of(*turns)
    assert whole < 30 * (size_of(turns[0]) + 8 * 30)
    store = ResponseStore(max_bytes=whole)
    for turn in turns:
        store.keep(turn)
    assert len(store) == 30
    for turn in turns[:-1]:
        store.delete(turn)
    assert store.num_bytes == size_of(turns[-1]) > 30 * 1000, "the last one has all of it"
    store.delete(turns[-1])
    assert (store.num_bytes, len(store)) == (0, 0)


def test_a_tenant_makes_room_for_itself_and_not_at_the_cost_of_others() -> None:
    store = ResponseStore(max_bytes=6 * size_of(kept(99)))
    store.keep(kept(0))
    for number in range(1, 40):
        store.keep(kept(number, tenant="loud"))
    assert there(store, 0), "the oldest, and of the one that has least"
    assert len(store) == 6
