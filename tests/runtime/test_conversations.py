"""Conversations: stored lists of items that responses use and extend, whole, streamed and in the background."""

import asyncio
from base64 import b64encode
from typing import Any

import pytest

from tests.asgi import call, eventually
from tests.fakes import TOKENIZER, says
from tests.runtime.conftest import Site

PATH, RESPONSES = "/v1/conversations", "/v1/responses"
SAID = {"role": "user", "content": "My name is Ana."}


async def created(site: Site, *items: dict[str, Any]) -> str:
    made = (await call(site.app, PATH, {"items": list(items), "metadata": {"a": "b"}})).json
    assert (made["object"], made["metadata"], made["id"][:5]) == ("conversation", {"a": "b"}, "conv_")
    return str(made["id"])


async def texts(site: Site, name: str) -> list[str]:
    """Return the texts of a conversation's items, the oldest first."""
    listed = (await call(site.app, f"{PATH}/{name}/items?order=asc&limit=100")).json
    return [item["content"][0]["text"] for item in listed["data"]]


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}, {"background": True, "stream": True}])
async def test_a_response_continues_its_conversation_and_is_added_to_it(site: Site, how: dict[str, Any]) -> None:
    name = await created(site, SAID)
    for turn, said in enumerate(("One", "Two")):
        site.engine.script = says(f"Answer {turn}")
        given: Any = name if turn == 0 else {"id": name}
        answer = await call(site.app, RESPONSES, {"model": "tiny", "input": said, "conversation": given, **how})
        assert answer.status == 200, answer.body
        told = ["My name is Ana.", "One", "Answer 0", "Two", "Answer 1"][: 3 + 2 * turn]
        for _ in range(200):
            if await texts(site, name) == told:
                break
            await eventually(lambda: not site.engine.open)
        assert await texts(site, name) == told
    prompt = TOKENIZER.decode(site.engine.submits[-1].prompt_token_ids, skip_special_tokens=False)
    assert prompt.index("Ana") < prompt.index("One") < prompt.index("Answer 0") < prompt.index("Two")
    if not how:
        assert answer.json["conversation"] == {"id": name}


async def test_items_are_added_read_and_taken_out(site: Site) -> None:
    name = await created(site)
    added = (await call(site.app, f"{PATH}/{name}/items", {"items": [SAID, {"role": "user", "content": "Two"}]})).json
    first, second = [item["id"] for item in added["data"]]
    assert (await call(site.app, f"{PATH}/{name}/items/{second}")).json["content"][0]["text"] == "Two"
    removed = await call(site.app, f"{PATH}/{name}/items/{first}", method="DELETE")
    assert removed.json["object"] == "conversation"
    assert await texts(site, name) == ["Two"]
    assert (await call(site.app, f"{PATH}/{name}/items/{first}")).status == 404


async def test_a_conversation_is_changed_and_deleted_and_its_responses_stay(site: Site) -> None:
    name = await created(site, SAID)
    answer = await call(site.app, RESPONSES, {"model": "tiny", "input": "One", "conversation": name})
    changed = (await call(site.app, f"{PATH}/{name}", {"metadata": {"c": "d"}})).json
    assert changed == {**(await call(site.app, f"{PATH}/{name}")).json, "metadata": {"c": "d"}}
    assert len(await texts(site, name)) == 3
    deleted = (await call(site.app, f"{PATH}/{name}", method="DELETE")).json
    assert (deleted["deleted"], deleted["object"]) == (True, "conversation.deleted")
    assert (await call(site.app, f"{PATH}/{name}")).status == 404
    assert (await call(site.app, f"{RESPONSES}/{answer.json['id']}")).status == 200


async def test_a_response_that_is_deleted_leaves_what_it_said(site: Site) -> None:
    name = await created(site, SAID)
    answer = await call(site.app, RESPONSES, {"model": "tiny", "input": "One", "conversation": name})
    await call(site.app, f"{RESPONSES}/{answer.json['id']}", method="DELETE")
    assert len(await texts(site, name)) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"conversation": "resp_1"},
        {"conversation": "conv_none"},
        {"conversation": 7},
        {"conversation": "conv_x", "previous_response_id": "resp_x"},
        {"conversation": "conv_x", "store": False},
    ],
)
async def test_a_conversation_that_cannot_be_is_refused_by_name(site: Site, wrong: dict[str, Any]) -> None:
    answer = await call(site.app, RESPONSES, {"model": "tiny", "input": "Hi", **wrong})
    assert answer.status in (400, 404)
    assert answer.json["error"]["param"] == "conversation"


async def test_another_account_finds_no_conversation_and_no_path_takes_one_for_a_response(site: Site) -> None:
    name = await created(site, SAID)
    assert (await call(site.app, f"{PATH}/{name}", authorization="Bearer other")).status == 404
    assert (await call(site.app, f"{RESPONSES}/{name}")).status == 404
    assert (await call(site.app, PATH)).status == 405
    assert (await call(site.app, PATH, {"items": "x"})).status == 400
    assert (await call(site.app, f"{PATH}/{name}/items", {"items": []})).status == 400


async def test_items_that_are_nested_too_deep_are_refused(site: Site) -> None:
    deep = b"[" * 300 + b"]" * 300
    for path, body in (
        (PATH, b'{"items": [{"role": "user", "content": "Hi", "x": %b}]}'),
        (RESPONSES, b'{"model": "tiny", "input": [{"role": "user", "content": "Hi", "x": %b}]}'),
        (RESPONSES, b'{"model": "tiny", "input": "Hi", "x": %b}'),
    ):
        answer = await call(site.app, path, body=body % deep)
        assert (answer.status, answer.json["error"]["message"]) == (400, "the JSON is nested too deep")


async def test_no_path_of_conversations_takes_a_response_for_one(site: Site) -> None:
    response = (await call(site.app, RESPONSES, {"model": "tiny", "input": "One"})).json
    name = f"{PATH}/{response['id']}"
    statuses = [(await call(site.app, name, method=method)).status for method in ("GET", "DELETE")]
    statuses.append((await call(site.app, name, {"metadata": {"a": "b"}})).status)
    statuses.append((await call(site.app, f"{name}/items", {"items": [SAID]})).status)
    assert statuses == [404, 404, 404, 404]
    assert (await call(site.app, f"{RESPONSES}/{response['id']}")).json == response


async def test_items_that_are_added_at_once_are_all_kept(site: Site) -> None:
    name = await created(site)
    given = [{"items": [{"role": "user", "content": str(number)}]} for number in range(12)]
    answers = await asyncio.gather(*(call(site.app, f"{PATH}/{name}/items", each) for each in given))
    assert {answer.status for answer in answers} == {200}
    assert sorted(map(int, await texts(site, name))) == list(range(12))


async def test_files_of_text_are_read_again_in_every_history(site: Site) -> None:
    def prompt() -> str:
        return TOKENIZER.decode(site.engine.submits[-1].prompt_token_ids, skip_special_tokens=False)

    file = {
        "type": "input_file",
        "filename": "a.txt",
        "file_data": f"data:text/plain;base64,{b64encode(b'It is green.').decode()}",
    }
    pdf = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,aaaa"}
    asked = {"model": "tiny", "input": [{"role": "user", "content": [file, pdf]}]}
    name = await created(site)
    first = (await call(site.app, RESPONSES, {**asked, "conversation": name})).json
    for how in ({"conversation": name}, {"previous_response_id": first["id"]}):
        body = {"model": "tiny", "input": "So?", **how}
        counted = (await call(site.app, f"{RESPONSES}/input_tokens", body)).json["input_tokens"]
        answer = await call(site.app, RESPONSES, body)
        assert answer.json["usage"]["input_tokens"] == counted
        assert answer.headers["x-ignored-fields"] == "input[0].content[1].file_data"
        assert "a.txt\nIt is green.\na.pdf\n(A PDF file" in (read := prompt())
    listed = (await call(site.app, f"{RESPONSES}/{answer.json['id']}/input_items?order=asc")).json["data"]
    assert listed[0]["content"] == [file, pdf]
    assert (await call(site.app, RESPONSES, {"model": "tiny", "input": listed})).status == 200
    assert prompt() == read
