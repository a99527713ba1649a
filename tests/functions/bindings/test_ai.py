"""AI with a running site and a fake engine: shapes, streams, errors, waiting, batches, and callers that leave."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import ModelLoad, TokenOutput
from pilotlight.functions.bindings.ai import AI as RuntimeAI
from pilotlight.functions.bindings.ai import Run
from pilotlight.functions.bindings.binding import BindingError, BindingLimits, Services
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.inference import InferenceResponse
from pilotlight.functions.manifest import BindingDeclaration
from pilotlight.runtime.generation.inference import SiteInference
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.usage import ResourceUse
from tests.asgi import eventually
from tests.fakes import FakeEngineClient, FakeLauncher, ids, says
from tests.functions.bindings.conftest import Wire, Wired
from tests.runtime.conftest import Site, SiteMaker, make_site, model_directory, site  # noqa: F401 - fixtures
from workers.bindings.ai import AI, AbortController, AbortError, AbortSignal

MODEL = "@test/tiny"
INTERACTIVE = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def wired(site: Site, wire: Wire) -> Wired:  # noqa: F811
    return await wire(("ai", "AI", {}), inference=SiteInference(site.app.site))


@pytest.fixture
async def ai(wired: Wired) -> AI:
    face: AI = wired.env["AI"]
    return face


async def test_a_call_gives_the_result_without_its_envelope(site: Site, ai: AI) -> None:  # noqa: F811
    result = await ai.run(MODEL, INTERACTIVE)
    assert result.response == "Hello, world"
    assert result["usage"]["completion_tokens"] == 13
    assert site.engine.submits[0].prompt_token_ids == ids("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


async def test_an_alias_of_the_manifest_stands_for_a_model_where_the_site_has_none_of_its_name(
    site: Site,  # noqa: F811
    wire: Wire,
) -> None:
    aliases = {"@cf/meta/llama-3.1-8b-instruct": MODEL, MODEL: "@test/another"}
    face = (await wire(("ai", "AI", {"aliases": aliases}), inference=SiteInference(site.app.site))).env["AI"]
    for name in aliases:
        assert (await face.run(name, INTERACTIVE)).response == "Hello, world"
    with pytest.raises(Exception, match="no model named '@cf/other'"):
        await face.run("@cf/other", INTERACTIVE)


async def test_inputs_may_be_keywords(site: Site, ai: AI) -> None:  # noqa: F811
    await ai.run(MODEL, prompt="Hi", max_tokens=7)
    assert site.engine.submits[0].sampling.max_tokens == 7
    assert site.engine.submits[0].prompt_token_ids == ids("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


async def test_a_reranker_ranks_contexts(make_site: SiteMaker, wire: Wire) -> None:  # noqa: F811
    def prepare(client: FakeEngineClient) -> None:
        client.pooling, client.labels = "cls", ("LABEL_0",)
        client.answer = lambda submit: [
            TokenOutput("", finish_reason="stop", embedding=(float(len(submit.prompt_token_ids)),))
        ]

    async with make_site(launcher=FakeLauncher(prepare)) as reranker:
        ai = (await wire(("ai", "AI", {}), inference=SiteInference(reranker.app.site))).env["AI"]
        contexts = [{"text": "bb"}, {"text": "dddd"}, {"text": "c"}]
        result = await ai.run(MODEL, {"query": "q", "contexts": contexts, "top_k": 2})
        longest, second = result["response"]
        assert (longest["id"], second["id"], longest["score"] - second["score"]) == (1, 0, 2.0)
        with pytest.raises(Exception, match="contexts: must not be empty"):
            await ai.run(MODEL, {"query": "q", "contexts": []})


async def test_every_function_is_a_tenant_of_its_own(site: Site, wire: Wire) -> None:  # noqa: F811
    for function in ("one", "two", "one"):
        env = (await wire(("ai", "AI", {}), inference=SiteInference(site.app.site), function=function)).env
        await env["AI"].run(MODEL, INTERACTIVE)
    salts = [submit.salt for submit in site.engine.submits]
    assert salts[0] == salts[2] != salts[1]


async def test_a_stream_is_server_sent_events(ai: AI) -> None:
    stream = await ai.run(MODEL, {**INTERACTIVE, "stream": True})
    events = [block.partition("data: ")[2] for block in (await stream.text()).split("\n\n") if "data: " in block]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["response"] for event in events[:-1]) == "Hello, world"


async def test_a_raw_response_has_status_headers_and_body(ai: AI) -> None:
    pytest.importorskip("workers.http.response")
    response = await ai.run(MODEL, INTERACTIVE, {"returnRawResponse": True})
    assert (response.status, response.headers["content-type"]) == (200, "application/json")
    assert (await response.json())["response"] == "Hello, world"
    streamed = await ai.run(MODEL, {**INTERACTIVE, "stream": True}, return_raw_response=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert (await streamed.text()).endswith("data: [DONE]\n\n")
    refused = await ai.run("@cf/nope", INTERACTIVE, returnRawResponse=True)
    assert refused.status == 400
    assert (await refused.json())["errors"][0]["code"] == 5007


@pytest.mark.parametrize(
    ("model", "inputs", "code", "status"),
    [
        ("@cf/nope", INTERACTIVE, 5007, 400),
        ("no\nsuch?model=1&x", INTERACTIVE, 5007, 400),
        ("../../../../v1/models", INTERACTIVE, 5007, 400),
        (MODEL, {"promt": "Hi"}, 5004, 400),
        (MODEL, {}, 5004, 400),
        (MODEL, {"prompt": "x" * 600}, 3006, 413),
        (MODEL, {"prompt": b"bytes"}, 5004, 400),
        (MODEL, {"prompt": "x" * (8 << 20)}, 3006, 413),
    ],
)
async def test_errors_carry_code_and_status(ai: AI, model: str, inputs: Any, code: int, status: int) -> None:
    for further in ({}, {"stream": True}):
        with pytest.raises(Failure) as caught:
            await ai.run(model, {**inputs, **further})
        assert (caught.value.code, caught.value.status, caught.value.name) == (code, status, "InferenceUpstreamError")
        assert str(caught.value).startswith(f"{code}: ")


async def test_models_are_listed_as_cards(ai: AI) -> None:
    (card,) = await ai.models()
    assert (card.name, card.task.name) == ("tiny", "Text Generation")
    assert await ai.models({"search": "nothing like it"}) == []


async def test_leaving_a_stream_stops_the_model(site: Site, ai: AI) -> None:  # noqa: F811
    site.engine.script = [*says("Hello", finish=None), asyncio.Event()]
    stream = await ai.run(MODEL, {**INTERACTIVE, "stream": True})
    async for chunk in stream:
        assert b"H" in chunk
        break
    await stream.cancel()
    await site.is_idle()
    assert len(site.engine.aborted) == 1


async def test_leaving_before_the_first_token_stops_the_model(site: Site, ai: AI) -> None:  # noqa: F811
    site.engine.script = [asyncio.Event()]
    for inputs in (INTERACTIVE, {**INTERACTIVE, "stream": True}):
        task = asyncio.ensure_future(ai.run(MODEL, inputs))
        await eventually(lambda: bool(site.engine.open))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await site.is_idle()
    assert len(site.engine.aborted) == 2


async def test_a_function_that_dies_stops_its_models(site: Site, wired: Wired) -> None:  # noqa: F811
    site.engine.script = [*says("Hello", finish=None), asyncio.Event()]
    stream = await wired.env["AI"].run(MODEL, {**INTERACTIVE, "stream": True})
    await anext(aiter(stream))
    wired.channel.close("killed")
    await site.is_idle()
    assert len(site.engine.aborted) == 1


async def test_a_signal_aborts_a_call_and_a_stream(site: Site, ai: AI) -> None:  # noqa: F811
    site.engine.script = [*says("Hello", finish=None), asyncio.Event()]
    controller = AbortController()
    task = asyncio.ensure_future(ai.run(MODEL, INTERACTIVE, {"signal": controller.signal}))
    await eventually(lambda: bool(site.engine.open))
    controller.abort("enough")
    with pytest.raises(AbortError, match="enough"):
        await task
    await site.is_idle()

    controller = AbortController.new()
    stream = await ai.run(MODEL, {**INTERACTIVE, "stream": True}, signal=controller.signal)
    reading = asyncio.ensure_future(stream.text())
    await eventually(lambda: bool(site.engine.open))
    controller.abort()
    with pytest.raises(AbortError):
        await reading
    await site.is_idle()
    with pytest.raises(AbortError):
        await ai.run(MODEL, INTERACTIVE, signal=controller.signal)
    with pytest.raises(AbortError, match="20 ms have passed"):
        await ai.run(MODEL, INTERACTIVE, signal=AbortSignal.timeout(20))
    await site.is_idle()


async def test_a_call_waits_for_room_and_reject_if_busy_does_not(make_site: SiteMaker, wire: Wire) -> None:  # noqa: F811
    async with make_site(limits={"max_inflight": 1}) as site:  # noqa: F811
        ai = (await wire(("ai", "AI", {}), inference=SiteInference(site.app.site))).env["AI"]
        gate = asyncio.Event()
        site.engine.scripts = [[gate, *says("first")], says("second")]
        first = asyncio.ensure_future(ai.run(MODEL, INTERACTIVE))
        await eventually(lambda: bool(site.engine.open))
        second = asyncio.ensure_future(ai.run(MODEL, INTERACTIVE))
        with pytest.raises(Failure) as caught:
            await ai.run(MODEL, INTERACTIVE, {"rejectIfBusy": True})
        assert (caught.value.code, caught.value.status) == (3040, 429)
        await asyncio.sleep(0.1)
        assert not second.done()
        gate.set()
        assert (await first).response == "first"
        assert (await second).response == "second"
        site.engine.loads["tiny"] = ModelLoad(waiting=1)
        with pytest.raises(Failure, match="3040: the model is busy"):
            await ai.run(MODEL, INTERACTIVE, rejectIfBusy=True)
        await site.is_idle()


class FakeInference:
    """An Inference that answers every call with the same result, and records the headers."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}

    def is_busy(self, model: str) -> bool:
        return False

    def serves(self, model: str) -> bool:
        return True

    def models(self, search: str) -> list[dict[str, Any]]:
        return []

    async def run(self, account: str, model: str, inputs: bytes, headers: Mapping[str, str]) -> InferenceResponse:
        self.headers.update(headers)
        return InferenceResponse(200, [("content-type", "application/json")], b'{"response":"x"}')


async def test_a_call_does_not_wait_for_room_for_ever(wire: Wire) -> None:
    class FullInference(FakeInference):
        async def run(self, *asked: Any) -> InferenceResponse:
            body = b'{"errors": [{"code": 3040, "message": "full"}]}'
            return InferenceResponse(429, [("content-type", "application/json")], body)

    limits = BindingLimits(ai_wait_s=0.0)
    ai = (await wire(("ai", "AI", {}), inference=FullInference(), limits=limits)).env["AI"]
    with pytest.raises(Failure) as caught:
        await asyncio.wait_for(ai.run(MODEL, INTERACTIVE), 2)
    assert caught.value.status == 429


@pytest.mark.parametrize(("status", "code"), [(503, 3040), (429, 3036)])
async def test_a_call_waits_neither_for_a_site_nor_for_a_quota(wire: Wire, status: int, code: int) -> None:
    class AwayInference(FakeInference):
        num_asked = 0

        async def run(self, *asked: Any) -> InferenceResponse:
            self.num_asked += 1
            body = json.dumps({"errors": [{"code": code, "message": "no site is available"}]}).encode()
            return InferenceResponse(status, [("content-type", "application/json")], body)

    inference = AwayInference()
    ai = (await wire(("ai", "AI", {}), inference=inference)).env["AI"]
    with pytest.raises(Failure) as caught:
        await ai.run(MODEL, INTERACTIVE)
    assert (caught.value.code, caught.value.status, inference.num_asked) == (code, status, 1)


async def test_extra_headers_pass_and_the_runtimes_own_do_not(wire: Wire) -> None:
    inference = FakeInference()
    ai = (await wire(("ai", "AI", {}), inference=inference)).env["AI"]
    extra = {"x-session-affinity": "abc", "x-pilotlight-hop": "forged", "connection": "close", "Host": "evil"}
    await ai.run(MODEL, INTERACTIVE, {"extraHeaders": extra, "tags": ["a"], "gateway": {"id": "g"}})
    assert inference.headers == {"x-session-affinity": "abc"}


async def test_a_key_in_the_extra_headers_makes_another_tenant(site: Site, ai: AI) -> None:  # noqa: F811
    for headers in ({}, {"authorization": "Bearer one"}, {"Authorization": "Bearer one"}):
        await ai.run(MODEL, INTERACTIVE, {"extraHeaders": headers})
    salts = [submit.salt for submit in site.engine.submits]
    assert salts[0] != salts[1] == salts[2]


async def test_a_body_beyond_the_sites_own_limit_is_refused(make_site: SiteMaker, wire: Wire) -> None:  # noqa: F811
    async with make_site(limits={"max_body_mib": 0.001}) as site:  # noqa: F811
        ai = (await wire(("ai", "AI", {}), inference=SiteInference(site.app.site))).env["AI"]
        with pytest.raises(Failure, match="larger than the limit of 1048 bytes"):
            await ai.run(MODEL, {"prompt": "x" * 1100})


async def test_a_silent_stream_has_heartbeats_and_then_an_error_is_an_event(make_site: SiteMaker, wire: Wire) -> None:  # noqa: F811
    async with make_site(limits={"heartbeat_s": 0.02}) as site:  # noqa: F811
        ai = (await wire(("ai", "AI", {}), inference=SiteInference(site.app.site))).env["AI"]
        gate = asyncio.Event()
        site.engine.script = [gate, EngineError("engine_error", "the step failed")]
        stream = await ai.run(MODEL, {**INTERACTIVE, "stream": True})
        chunks = aiter(stream)
        assert (await anext(chunks)).startswith(b":")
        gate.set()
        rest = b"".join([chunk async for chunk in chunks])
        assert b'"errors":[{"code":5000,"message":"the step failed"}]' in rest


@pytest.mark.process
async def test_a_batch_is_queued_polled_and_answered_with_its_references(site: Site, ai: AI) -> None:  # noqa: F811
    requests = [{"prompt": "a", "external_reference": "A"}, {"prompt": "b"}, {"promt": "c"}]
    queued = await ai.run(MODEL, {"requests": requests}, {"queueRequest": True})
    assert (queued.status, queued.model) == ("queued", MODEL)
    answered: Any = None

    async def is_complete() -> bool:
        nonlocal answered
        answered = await ai.run(MODEL, {"request_id": queued.request_id})
        return bool(answered.status == "complete")

    await eventually(is_complete)
    assert [response.success for response in answered.responses] == [True, True, False]
    assert answered.responses[0].result.response == "Hello, world"
    assert answered.responses[0].external_reference == "A"
    assert answered.responses[2].errors[0].code == 5004
    with pytest.raises(Failure, match="there is no batch"):
        await ai.run(MODEL, {"request_id": "nope"})
    refused: list[list[Any]] = [[], ["text"], [{"prompt": "a", "stream": True}]]
    for requests in refused:
        with pytest.raises(Failure, match="5004"):
            await ai.run(MODEL, {"requests": requests}, queueRequest=True)


@pytest.mark.process
async def test_a_request_of_a_batch_that_is_too_large_does_not_stop_the_others(ai: AI) -> None:
    asked = {"requests": [{"prompt": "x" * (9 << 20)}, {"prompt": "b"}]}
    queued = await ai.run(MODEL, asked, {"queueRequest": True})
    answered: Any = None

    async def is_complete() -> bool:
        nonlocal answered
        answered = await ai.run(MODEL, {"request_id": queued.request_id})
        return bool(answered.status == "complete")

    await eventually(is_complete)
    first, second = answered.responses
    assert (first.success, first.errors[0].code, second.success) == (False, 3006, True)


async def test_a_site_without_models_says_so(tmp_path: Path) -> None:
    with pytest.raises(BindingError, match=r"add a \[\[models\]\] table"):
        RuntimeAI.open(BindingDeclaration("ai", "AI", {}), tmp_path, Services())


async def test_misspelt_options_are_named(ai: AI) -> None:
    with pytest.raises(TypeError, match="did you mean 'reject_if_busy'"):
        await ai.run(MODEL, INTERACTIVE, {"rejectIfBussy": True})
    with pytest.raises(TypeError, match="its inputs as a dict, not list"):
        await ai.run(MODEL, [INTERACTIVE])


async def test_an_unknown_model_gets_the_list_of_known_ones(ai: AI) -> None:
    with pytest.raises(Failure, match=r"5007: this site has no model named '@cf/meta/llama'.*; it has ") as told:
        await ai.run("@cf/meta/llama", INTERACTIVE)
    assert MODEL.rpartition("/")[2] in told.value.message


async def test_inputs_of_the_responses_api_are_a_conversation(site: Site, ai: AI) -> None:  # noqa: F811
    response = await ai.run(MODEL, {"instructions": "Be brief.", "input": "Hi", "max_output_tokens": 5})
    assert response.object == "response"
    assert response.output[0].content[0].text == response.output_text != ""
    assert response.usage.output_tokens > 0
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert site.engine.submits[0].prompt_token_ids == ids(prompt)
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    assert (await ai.run(MODEL, {"input": turns})).output_text == response.output_text


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({"input": [{"type": "weather_report"}]}, "items of type 'weather_report' are not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "parts of type 'input_audio'"),
        ({"input": "Hi", "previous_response_id": "a"}, "responses are not stored here"),
    ],
)
async def test_what_the_responses_api_has_beyond_texts_is_refused_by_name(
    ai: AI, inputs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Failure, match=f"5004: .*{sentence}"):
        await ai.run(MODEL, inputs)


async def test_what_is_not_offered_beside_run_says_so(ai: AI) -> None:
    with pytest.raises(NotImplementedError, match="AI gateways are not offered"):
        ai.gateway("x")
    with pytest.raises(NotImplementedError, match="AutoRAG is not offered"):
        ai.autorag("x")


class Counting:
    """A FunctionUsage that records its arguments."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.told: list[Any] = []
        self.is_full = False

    def is_limited(self, function: str) -> bool:
        return False

    def begin(self, *asked: Any) -> Any:
        if self.is_full:
            raise ApiError("overloaded", "ask again later")
        self.started.append(asked)
        return SimpleNamespace(count=self.told.append, sends=self.told.append)

    def end(self, meter: Any, outcome: str) -> None:
        self.told.append(outcome)


class Named(FakeInference):
    """Models with one adapter each; one model fails."""

    def own_names(self, model: str) -> tuple[str, str]:
        return model.removeprefix("@x/"), "french"

    async def run(self, account: str, model: str, inputs: bytes, headers: Mapping[str, str]) -> InferenceResponse:
        if model == "@x/broken":
            raise RuntimeError("broken")
        return InferenceResponse(200, [], b"12345", use=ResourceUse(1, 0, 2))


@pytest.mark.parametrize(("lora", "adapter"), [(None, "french"), ("tone", "tone"), (7, "french")])
async def test_a_call_is_counted_under_its_models_own_name_and_the_adapter_that_it_asks_for(
    lora: object, adapter: str
) -> None:
    usage = Counting()
    ai = RuntimeAI(Services(inference=Named(), usage=usage, function="hello"), None)
    inputs = {"prompt": "p"} if lora is None else {"prompt": "p", "lora": lora}
    await ai.run(Run("@x/ember", inputs))
    assert usage.started == [("hello", "ember", adapter, len(json.dumps(inputs, separators=(",", ":"))))]
    assert usage.told == [ResourceUse(1, 0, 2), 5, "complete"]
    usage.told.clear()
    with pytest.raises(RuntimeError, match="broken"):
        await ai.run(Run("@x/broken", inputs))
    assert usage.told == ["cut"]
    usage.is_full = True
    with pytest.raises(BindingError, match="ask again later") as refused:
        await ai.run(Run("@x/ember", inputs))
    assert refused.value.status == 429


class Answering:
    """An Inference that answers with the given statuses in turn, then with 200; bodies have the number of the call."""

    def __init__(self, *statuses: int, stands_still: bool = False) -> None:
        self._statuses, self._stands_still = list(statuses), stands_still
        self.num_calls = 0

    def is_busy(self, model: str) -> bool:
        return False

    serves = is_busy

    async def run(self, account: str, model: str, inputs: bytes, headers: Mapping[str, str]) -> InferenceResponse:
        self.num_calls += 1
        if self._stands_still:
            await asyncio.Event().wait()
        status = self._statuses.pop(0) if self._statuses else 200
        envelope = {"errors": [{"code": 3043, "message": "broken"}], "response": str(self.num_calls)}
        return InferenceResponse(status, [("content-type", "application/json")], json.dumps(envelope).encode())


async def test_a_gateways_cache_answers_the_same_call_again(wire: Wire) -> None:
    models = Answering()
    ai = (await wire(("ai", "AI", {}), inference=models)).env["AI"]
    cached = {"gateway": {"id": "mine", "cacheTtl": 60}}
    for options, expected in (
        (cached, "1"), (cached, "1"), ({}, "2"), ({"gateway": {"id": "mine", "cacheTtl": 60, "skipCache": True}}, "3"),
        ({"gateway": {"id": "other", "cacheTtl": 60}}, "4"), ({"gateway": {"id": "mine"}}, "5"),
    ):  # fmt: skip
        assert (await ai.run(MODEL, {"prompt": "Hi"}, options)).response == expected
    assert (await ai.run(MODEL, {"prompt": "Ho"}, cached)).response == "6"
    by_key = {"gateway": {"id": "mine", "cache_ttl": 60, "cache_key": "k", "metadata": {"user": 7}}}
    assert [(await ai.run(MODEL, {"prompt": text}, by_key)).response for text in ("a", "b")] == ["7", "7"]
    raw = await ai.run(MODEL, {"prompt": "Hi"}, {**cached, "returnRawResponse": True})
    assert raw.headers["cf-aig-cache-status"] == "HIT"


async def test_a_gateways_retries_and_its_time_limit_are_kept(wire: Wire, tmp_path: Path) -> None:
    async def run(models: Answering, **gateway: Any) -> Any:
        return (
            await (await wire(("ai", "AI", {}), inference=models))
            .env["AI"]
            .run(MODEL, {"prompt": "Hi"}, gateway=gateway)
        )

    broken = Answering(500, 503)
    assert (await run(broken, retries={"maxAttempts": 3, "backoff": "exponential"})).response == "3"
    with pytest.raises(Exception, match="3043: broken"):
        await run(Answering(500, 500), retries={"maxAttempts": 2})
    refused = Answering(400)
    with pytest.raises(Exception, match="3043: broken"):
        await run(refused, retries={"maxAttempts": 5})
    assert refused.num_calls == 1, "invalid calls are not retried"
    slow = Answering(stands_still=True)
    with pytest.raises(Exception, match="3007: the model has not answered within 20 ms"):
        await run(slow, requestTimeoutMs=20, retries={"maxAttempts": 2})
    assert slow.num_calls == 2
    with pytest.raises(TypeError, match="did you mean 'retry_delay_ms'"):
        await run(slow, retries={"retryDelay": 5})
