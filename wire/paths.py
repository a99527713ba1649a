"""The paths of the API as clients write them, and the errors for paths that it does not have."""

import json
import re
from typing import Any

# Prefixes of the API's paths.
API_PATHS = ("/v1/", "/ai/v1/", "/client/v4/", "/api/", "/openai/", "/v2/", "/rerank", "/score", "/classify")

DEPLOYMENT = "pilotlight.deployment"  # a scope's model, if its path is Azure's and names one

# Azure's path, with or without a deployment's name, which may have slashes, as models' names have.
_AZURE = re.compile(r"/openai(?:/v1|/deployments/(.+?)(?=/(?:chat|completions|embeddings|audio|images)(?:/|$)))?(?=/)")
_SLASH, _DOT = re.compile(r"[/\\]"), re.compile("%2e", re.IGNORECASE)
_DOTS = re.compile(r"\\|/(?:\.|%2e){1,2}(?:/|\Z)", re.IGNORECASE)
_V1 = re.compile(r"(?:/client/v4/accounts/[^/]+)?(?:/ai)?/v1/([a-z_]+)")
_UPLOAD = "send text files of requests to /v1/files, and adapters to /client/v4/accounts/ACCOUNT/ai/finetunes"
_NO_AGENTS = "use /v1/responses and /v1/conversations, which store conversations"
# Parts of OpenAI's API that do not exist here, with the reason or the alternative.
_ABSENT = {
    "assistants": _NO_AGENTS, "threads": _NO_AGENTS, "chatkit": _NO_AGENTS,
    "audio": "there are no models for speech", "realtime": "there are no models for speech", "images": "there are no models that make images",
    "videos": "there are no models that make videos", "moderations": "there are no moderation models: classify texts at /v1/decisions",
    "vector_stores": "make vectors at /v1/embeddings and store them elsewhere", "uploads": _UPLOAD, "containers": "code for models is not run",
    "evals": "evaluations are not run; /v1/batches accepts their requests", "complete": "Anthropic's texts are at /v1/messages",
    "organization": "accounts and keys are in the network's file", "skills": "code for models is not run",
}  # fmt: skip


def normalize_path(scope: Any) -> None:
    """Change an API path to the form of the routes: without a final slash and without Azure's prefix.

    Clients add the slash to a base URL. A redirect would turn a POST into a GET.
    """
    path = scope.get("path", "")  # a lifespan has no path
    if path.startswith("/openai/"):
        if (found := _AZURE.match(path)) is not None and found[1] is not None:
            scope[DEPLOYMENT] = found[1]
        _set(scope, _AZURE.sub("/v1", path, count=1), lambda raw: _AZURE.sub("/v1", raw, count=1))
        path = scope["path"]
    if path.endswith("/") and path.startswith(API_PATHS):
        _set(scope, path[:-1], lambda raw: raw.removesuffix("/"))


def _set(scope: Any, path: str, change: Any) -> None:
    scope["path"] = path
    if "raw_path" in scope:
        scope["raw_path"] = change(scope["raw_path"].decode("latin-1")).encode("latin-1")


def with_deployment(scope: Any, body: bytes) -> bytes:
    """Return a body whose model is the deployment in the path, if the path has one.

    In Azure's API the path alone decides: LangChain's clients send a null or a default name in the body. The name is appended, because of two equal
    names in an object the last counts.
    """
    deployment = scope.get(DEPLOYMENT)
    if deployment is None or not (stripped := body.rstrip()).endswith(b"}"):
        return body
    fields = stripped[:-1]
    comma = b"" if fields.strip() == b"{" else b","
    return b'%b%b"model":%b}' % (fields, comma, json.dumps(deployment).encode())


def without_dot_segments(path: str) -> str:
    """Return an encoded path as browsers send it, without dot segments and backslashes.

    The rules are those of https://url.spec.whatwg.org/#path-state."""
    if _DOTS.search(path) is None:
        return path
    kept: list[str] = []
    segments = _SLASH.split(path)[1:]
    for place, segment in enumerate(segments, start=1):
        dots = _DOT.sub(".", segment)
        if dots == "..":
            kept = kept[:-1]
        elif dots != ".":
            kept.append(segment)
        if dots in (".", "..") and place == len(segments):
            kept.append("")
    return "/" + "/".join(kept)


def nothing_at(path: str) -> str:
    """Return the error message for a path that does not exist."""
    found = _V1.match(path)
    why = _ABSENT.get(found[1]) if found is not None else None
    return f"there is nothing at {path[:200]}: {why or 'the API is under /v1, /ai/v1, /client/v4, /api and /fn'}"
