"""Request paths as clients write them: Azure's paths, paths with a slash at the end, and unknown paths."""

import json
from typing import Any

import pytest

from pilotlight.wire.paths import DEPLOYMENT, normalize_path, nothing_at, with_deployment, without_dot_segments


@pytest.mark.parametrize(
    ("path", "means"),
    [
        ("/openai/deployments/ember/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/org%2Fember/embeddings", "/v1/embeddings"),
        ("/openai/deployments/@cf/meta/llama/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/ember/audio/speech", "/v1/audio/speech"),
        ("/openai/v1/responses/", "/v1/responses"),
        ("/openai/responses", "/v1/responses"),
        ("/openai/models", "/v1/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/api/tags/", "/api/tags"),
        ("/fn/openai/x/", "/fn/openai/x/"),
        ("/page/", "/page/"),
        ("/openai", "/openai"),
    ],
)
def test_a_path_means_the_same_however_it_is_written(path: str, means: str) -> None:
    scope = {"path": path, "raw_path": path.encode()}
    normalize_path(scope)
    assert (scope["path"], scope["raw_path"]) == (means, means.encode())


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (b'{"model": null, "n": 1} \n', {"model": '@cf/em"ber', "n": 1}),
        (b'{"n": {"model": "x"}}', {"model": '@cf/em"ber', "n": {"model": "x"}}),
        (b"{ }", {"model": '@cf/em"ber'}),
    ],
)
def test_a_deployment_in_the_path_is_the_model_of_the_body(body: bytes, read: dict[str, Any]) -> None:
    scope = {"path": '/openai/deployments/@cf/em"ber/completions/'}
    normalize_path(scope)
    assert (scope["path"], json.loads(with_deployment(scope, body))) == ("/v1/completions", read)


@pytest.mark.parametrize("body", [b"", b'"}', b"{", b"}", b'{"a":1}}', b'{"a":1,}', b"[{}"])
def test_a_deployment_never_makes_a_malformed_body_valid(body: bytes) -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(with_deployment({DEPLOYMENT: "ember"}, body))


@pytest.mark.parametrize(
    ("path", "resolved"),
    [
        ("/a/../b", "/b"),
        ("/a/./b/.", "/a/b/"),
        ("/a/b/..", "/a/"),
        ("/..", "/"),
        ("/../../b", "/b"),
        ("/a/%2e%2E/b/%2e", "/b/"),
        ("/a/.%2e/b", "/b"),
        ("/a//../b", "/a/b"),
        ("//..", "/"),
        ("/a\\..\\b", "/b"),
        ("/a/..%2fb/...", "/a/..%2fb/..."),
        ("/a/.b/c..", "/a/.b/c.."),
        ("/a/%2eb//", "/a/%2eb//"),
        ("/", "/"),
        ("*", "*"),
        ("", ""),
    ],
)
def test_dot_segments_are_resolved_as_browsers_resolve_them(path: str, resolved: str) -> None:
    assert without_dot_segments(path) == resolved
    assert without_dot_segments(resolved) == resolved


def test_an_unavailable_path_is_refused_by_a_specific_sentence() -> None:
    assert "speech" in nothing_at("/v1/audio/transcriptions")
    assert "/v1/conversations" in nothing_at("/client/v4/accounts/a/ai/v1/threads")
    assert "/v1/decisions" in nothing_at("/ai/v1/moderations")
    assert "/fn" in nothing_at("/v1/nothing")
    assert "/fn" in nothing_at("/elsewhere")
