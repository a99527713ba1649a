"""The table of the router's paths and their applications.

A request for any other path gets a 404 before its body is read."""

import re
from enum import Enum
from functools import lru_cache
from urllib.parse import parse_qs

from starlette.types import Scope

_ACCOUNT = r"/client/v4/accounts/[^/]+"
_V1 = rf"(?:{_ACCOUNT})?(?:/ai)?/v1"


class RouterService(Enum):
    SITES = "sites"
    RESPONSES = "responses"
    MODEL_LISTS = "model lists"
    RUNS = "runs"  # runs of a model, at a site or in a batch
    BATCHES = "batches"
    FINETUNES = "finetunes"


# The first pattern that matches a whole path determines its service.
_TABLE: tuple[tuple[RouterService, re.Pattern[str]], ...] = tuple(
    (service, re.compile(pattern))
    for service, pattern in (
        (
            RouterService.SITES,
            rf"{_V1}/(?:chat/completions|completions|embeddings|messages(?:/count_tokens)?|decisions|systemone)",
        ),
        (RouterService.SITES, rf"(?:{_V1})?/(?:rerank|score|classify)|/v2/rerank"),
        (RouterService.SITES, r"/fn/.*"),
        (RouterService.SITES, r"/api/(?:chat|generate|embed|embeddings|show|pull)"),
        (RouterService.RESPONSES, rf"{_V1}/(?:responses|conversations)(?:/.+)?"),
        (RouterService.MODEL_LISTS, rf"{_V1}/models(?:/.+)?|{_ACCOUNT}/ai/models/(?:search|schema)|/api/(?:tags|ps)"),
        (RouterService.RUNS, rf"{_ACCOUNT}/ai/run/.+"),
        (RouterService.BATCHES, rf"{_V1}/(?:files|batches)(?:/[^/]+(?:/(?:content|cancel))?)?"),
        (RouterService.SITES, rf"{_ACCOUNT}/ai/(?:tasks/search|finetunes/public)|/client/v4/user/tokens/verify"),
        (RouterService.FINETUNES, rf"{_V1}/fine_tuning/jobs(?:/[^/]+(?:/[^/]+)?)?"),
        (RouterService.FINETUNES, rf"{_ACCOUNT}/ai/finetunes(?:/[^/]+(?:/finetune-assets)?)?"),
    )
)


def service_of(scope: Scope) -> RouterService | None:
    """Return the service for a request; None if a Starlette route answers it or nothing does."""
    service = _service_at(scope.get("path", ""))  # a lifespan has no path
    if service is RouterService.RUNS:
        return RouterService.BATCHES if _is_queued(scope["query_string"]) else RouterService.SITES
    if service is RouterService.MODEL_LISTS and scope["method"] != "GET":
        return RouterService.SITES  # sites decide which paths under it they accept
    return service


@lru_cache(256)  # looking through the whole table takes 2 us, and most requests have the same path
def _service_at(path: str) -> RouterService | None:
    return next((service for service, pattern in _TABLE if pattern.fullmatch(path)), None)


def is_for_responses(path: str) -> bool:
    """Tell whether responses are created at a path."""
    return path.endswith("/responses") and _service_at(path) is RouterService.RESPONSES


def _is_queued(query: bytes) -> bool:
    return b"queueRequest" in query and parse_qs(query).get(b"queueRequest", [b""])[-1] == b"true"
