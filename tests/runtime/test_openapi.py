"""The served OpenAPI document is correct: schemathesis sends valid and invalid requests, and the document lists each response."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings

from pilotlight.dialects.openapi import OPERATIONS, document, page
from pilotlight.edge_router.app import build_app as build_router
from pilotlight.engine.api.protocol import Submit, TokenLogprobs, TokenOutput
from tests.asgi import call
from tests.edge_router.builders import network
from tests.edge_router.fakes import FakeSite, router, start_its_store
from tests.fakes import EOS, ids
from tests.runtime.conftest import Site, SiteMaker

KNOWN = {"model": "tiny", "account_id": "a"}


async def test_a_site_and_a_router_serve_the_same_document_and_page(site: Site) -> None:
    routing = build_router(network({"ams1": "http://x:1"}))
    for path in ("/openapi.json", "/docs"):
        mine, theirs = await call(site.app, path), await call(routing, path)
        assert mine.status == theirs.status == 200
        assert mine.body == theirs.body
    told = json.loads(document("1"))
    assert {(method, path) for path, methods in told["paths"].items() for method in methods} == {
        (each.method, each.path) for each in OPERATIONS
    }
    assert b"/v1/messages" in page("1")


def test_the_document_names_streams_where_a_request_can_ask_for_one() -> None:
    told = json.loads(document("1"))
    asking, streaming = set(), set()
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            forms = [told["components"]["schemas"][each["$ref"].rpartition("/")[2]] for each in _forms(schema)]
            if any("stream" in form.get("properties", {}) for form in forms):
                asking.add((method, path))
            if {"text/event-stream", "application/x-ndjson"} & operation["responses"]["200"]["content"].keys():
                streaming.add((method, path))
    assert {("post", "/v1/chat/completions"), ("post", "/v1/messages")} <= asking
    assert asking - streaming == {("post", "/v1/messages/count_tokens"), ("post", "/v1/responses/input_tokens")}, (
        "which receives the request as a server would"
    )


def _forms(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in (schema, *schema.get("anyOf", ())) if "$ref" in each]


def test_every_path_of_the_document_is_a_sites(model_directory: Any) -> None:
    from pilotlight.runtime.app import build_app
    from tests.fakes import FakeLauncher
    from tests.runtime.conftest import site_config

    app = build_app(site_config(model_directory), launchers=[FakeLauncher()])
    for each in OPERATIONS:
        url = each.path
        for name in ("account_id", "model", "response_id"):
            url = url.replace(f"{{{name}}}", "x")
        scope = {"type": "http", "method": each.method.upper(), "path": url}
        assert any(route.matches(scope)[0].value == 2 for route in app.router.routes), url


def answered(submit: Submit) -> Iterator[TokenOutput]:
    """Yield an answer with the requested log-probabilities."""
    tokens, most = (*ids("Hello"), EOS), submit.sampling.max_tokens
    prompt = tuple(TokenLogprobs(-1.0, ((1, -1.0),)) for _ in submit.prompt_token_ids[1:])
    for position, token in enumerate(tokens[:most]):
        is_end, is_limit = token == EOS, position == most - 1
        yield TokenOutput(
            "", (token,), "stop" if is_end else "length" if is_limit else None, 0 if position == 0 else None,
            logprobs=(TokenLogprobs(-0.5, ((token, -0.5),)),) if submit.sampling.num_logprobs is not None else None,
            prompt_logprobs=prompt if position == 0 and submit.sampling.prompt_logprobs else None,
        )  # fmt: skip


def checked(urls: tuple[str, ...], examples: int) -> int:
    """Send the same requests of every operation to each server; return their number. Raises if a response is not in the document."""
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
    schema = schemathesis.openapi.from_url(f"{urls[0]}/openapi.json")
    num_sent = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        takes_input = bool(len(operation.body) or len(operation.query))  # without these nothing can be invalid
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[: 1 + takes_input]:

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                nonlocal num_sent
                for name in case.path_parameters or {}:
                    case.path_parameters[name] = KNOWN.get(name, case.path_parameters[name])
                if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                    case.body["model"] = KNOWN["model"]
                for url in urls:
                    num_sent += 1
                    case.call_and_validate(base_url=url, checks=checks, timeout=30)

            try:
                send()
            except Exception as error:
                raise AssertionError(f"{operation.label}: {error}") from error
    return num_sent


@asynccontextmanager
async def beating(site: Site) -> AsyncIterator[None]:
    """Send heartbeats of the fake engine, which sends none itself while it is idle."""

    async def beat() -> None:
        while True:
            site.engine.heartbeat()
            await asyncio.sleep(1.0)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("examples", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
async def test_every_answer_is_one_that_the_document_names(make_server: SiteMaker, examples: int) -> None:
    async with make_server() as site, beating(site):
        site.engine.answer = answered
        fake = cast(FakeSite, SimpleNamespace(name=site.config.name, url=site.url))
        await start_its_store(site.url)
        async with router([fake]) as routing:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                num_sent = await asyncio.to_thread(checked, (site.url, routing.url), examples)
            assert num_sent > examples * len(OPERATIONS)
