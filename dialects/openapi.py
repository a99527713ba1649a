"""The OpenAPI document of all dialects (/openapi.json), made from their structs, and its page (/docs)."""

from functools import cache
from html import escape
from typing import Any, NamedTuple

import msgspec
import orjson

from pilotlight.dialects.anthropic import MESSAGE_SCHEMA, MessagesBody
from pilotlight.dialects.body.json_schemas import Schema, components
from pilotlight.dialects.decisions.openai_decisions import DecisionsBody
from pilotlight.dialects.decisions.system_one import SystemOneBody
from pilotlight.dialects.embeddings_api import EmbeddingBody
from pilotlight.dialects.ollama import (
    ModelBody,
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from pilotlight.dialects.openai_chat import ChatBody
from pilotlight.dialects.openai_completions import CompletionBody
from pilotlight.dialects.openai_responses import RESPONSE_SCHEMA, ResponsesBody
from pilotlight.dialects.scoring_api import ClassifyBody, RerankBody, ScoreBody
from pilotlight.dialects.workers_ai_api import FinetuneBody, RunBody, RunEmbeddingBody, RunRerankerBody
from pilotlight.wire.chat import ChatCompletion, Completion, ListedModel, ModelList
from pilotlight.wire.embeddings import EmbeddingList
from pilotlight.wire.errors import Dialect
from pilotlight.wire.lines import CONTENT_TYPE as LINES
from pilotlight.wire.scoring import ClassList, RerankResult, ScoredPosition, ScoreList
from pilotlight.wire.workers_ai import (
    EmbeddingResult,
    Envelope,
    FinetuneAsset,
    ListedFinetune,
    ModelCard,
    RerankerResult,
    Task,
    TextResult,
    TokenState,
)

ACCOUNT = "/client/v4/accounts/{account_id}/ai"
_REFERENCE = "#/components/schemas/{name}"


class ApiOperation(NamedTuple):
    """A method of a path.

    `body` and `answer` are types or tuples of types, or schemas where the dialect has no struct."""

    method: str
    path: str
    summary: str
    dialect: Dialect
    answer: Any
    body: Any = None
    streams: bool = False
    query: tuple[tuple[str, Schema], ...] = ()


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


_TEXT: Schema = {"type": "string"}
_EVENT = _object(data=_TEXT)  # schema of one event; OpenAPI before 3.2 describes a stream by it
_NUMBER: Schema = {"type": "integer", "minimum": 1, "maximum": 1000}
_LISTED = _object(object={"const": "list"}, data={"type": "array"}, has_more={"type": "boolean"})
_DELETED = _object(id=_TEXT, object={"const": "response"}, deleted={"const": True})
_COUNT = _object(input_tokens={"type": "integer"})
_SCHEMAS = _object(success={"const": True}, result=_object(input={"type": "object"}, output={"type": "object"}))
_ENVELOPED = _object(success={"const": True}, result=RESPONSE_SCHEMA)
_SEARCH = (("search", _TEXT), ("task", _TEXT), ("page", _NUMBER), ("per_page", _NUMBER))

_ANSWERS = _object(model=_TEXT, answers={"type": "object"})
_LINE = _object(model=_TEXT, created_at=_TEXT, done={"type": "boolean"})
_VECTORS = _object(model=_TEXT, embeddings={"type": "array"})
_MODELS = _object(models={"type": "array"})

_OPENAI, _RESPONSES, _ANTHROPIC, _NATIVE, _OLLAMA = (
    Dialect.OPENAI,
    Dialect.OPENAI_RESPONSES,
    Dialect.ANTHROPIC,
    Dialect.WORKERS_AI,
    Dialect.OLLAMA,
)
OPERATIONS = (
    ApiOperation("post", "/v1/chat/completions", "OpenAI's chat completions", _OPENAI, ChatCompletion, ChatBody, True),
    ApiOperation("post", "/v1/completions", "OpenAI's completions of texts or token ids", _OPENAI, Completion, CompletionBody, True),
    ApiOperation("post", "/v1/embeddings", "OpenAI's embeddings", _OPENAI, EmbeddingList, EmbeddingBody),
    ApiOperation("post", "/v1/rerank", "Rank documents by a query, in the form of Jina and Cohere", _OPENAI, RerankResult, RerankBody),
    ApiOperation("post", "/rerank", "Rank documents, also in the form of text-embeddings-inference", _OPENAI,
              (RerankResult, tuple[ScoredPosition, ...]), RerankBody),
    ApiOperation("post", "/v2/rerank", "Rank documents by a query, in the form of Cohere's second version", _OPENAI, RerankResult, RerankBody),
    ApiOperation("post", "/v1/score", "vLLM's scores of pairs of texts", _OPENAI, ScoreList, ScoreBody),
    ApiOperation("post", "/v1/classify", "vLLM's classes of texts", _OPENAI, ClassList, ClassifyBody),
    ApiOperation("get", "/v1/models", "The models that are served", _OPENAI, ModelList),
    ApiOperation("get", "/v1/models/{model}", "One model", _OPENAI, ListedModel),
    ApiOperation("post", "/v1/responses", "OpenAI's Responses", _RESPONSES, RESPONSE_SCHEMA, ResponsesBody, True),
    ApiOperation("post", "/v1/responses/input_tokens", "The number of a prompt's tokens", _RESPONSES, _COUNT, ResponsesBody),
    ApiOperation("get", "/v1/responses/{response_id}", "A stored response", _RESPONSES, RESPONSE_SCHEMA),
    ApiOperation("delete", "/v1/responses/{response_id}", "Delete a response", _RESPONSES, _DELETED),
    ApiOperation("post", "/v1/responses/{response_id}/cancel", "Cancel a background response", _RESPONSES, RESPONSE_SCHEMA),
    ApiOperation("get", "/v1/responses/{response_id}/input_items", "What was asked", _RESPONSES, _LISTED, query=(("limit", _NUMBER),)),
    ApiOperation("post", "/v1/decisions", "OpenAI's decisions", _OPENAI, _object(model=_TEXT, answers={"type": "array"}), DecisionsBody),
    ApiOperation("post", "/v1/systemone", "Decisions in System One's form", _OPENAI, _ANSWERS, SystemOneBody),
    ApiOperation("post", "/v1/messages", "Anthropic's Messages", _ANTHROPIC, MESSAGE_SCHEMA, MessagesBody, True),
    ApiOperation("post", "/v1/messages/count_tokens", "The number of a prompt's tokens", _ANTHROPIC, _COUNT, MessagesBody),
    ApiOperation("post", f"{ACCOUNT}/run/{{model}}", "Workers AI's run of a text or embedding model, or of a reranker", _NATIVE,
              (Envelope[TextResult], Envelope[EmbeddingResult], Envelope[RerankerResult], _ENVELOPED,
               _object(success={"const": True}, result=_ANSWERS)),
              (RunBody, RunEmbeddingBody, RunRerankerBody, ResponsesBody, SystemOneBody), True),
    ApiOperation("get", f"{ACCOUNT}/models/search", "Cards of models", _NATIVE, Envelope[tuple[ModelCard, ...]], query=_SEARCH),
    ApiOperation("get", f"{ACCOUNT}/models/schema", "A model's inputs and result", _NATIVE, _SCHEMAS, query=(("model", _TEXT),)),
    ApiOperation("get", f"{ACCOUNT}/tasks/search", "The tasks that models have", _NATIVE, Envelope[tuple[Task, ...]]),
    ApiOperation("get", f"{ACCOUNT}/finetunes", "The adapters of an account", _NATIVE, Envelope[tuple[ListedFinetune, ...]]),
    ApiOperation("post", f"{ACCOUNT}/finetunes", "Create an adapter, before its files are uploaded", _NATIVE, Envelope[ListedFinetune], FinetuneBody),
    ApiOperation("delete", f"{ACCOUNT}/finetunes/{{finetune_id}}", "Remove an adapter", _NATIVE, Envelope[ListedFinetune]),
    ApiOperation("post", f"{ACCOUNT}/finetunes/{{finetune_id}}/finetune-assets", "Upload a file of an adapter, as a form with file and file_name",
              _NATIVE, Envelope[FinetuneAsset]),
    ApiOperation("get", f"{ACCOUNT}/finetunes/public", "The adapters for all accounts", _NATIVE, Envelope[tuple[ListedFinetune, ...]],
              query=(("limit", _NUMBER), ("offset", {"type": "integer", "minimum": 0}))),
    ApiOperation("get", "/client/v4/user/tokens/verify", "Whether a token works", _NATIVE, Envelope[TokenState]),
    ApiOperation("post", "/api/chat", "Ollama's chat", _OLLAMA, _LINE, OllamaChatBody, True),
    ApiOperation("post", "/api/generate", "Ollama's completion of a prompt", _OLLAMA, _LINE, OllamaGenerateBody, True),
    ApiOperation("post", "/api/embed", "Ollama's embeddings", _OLLAMA, _VECTORS, OllamaEmbedBody),
    ApiOperation("post", "/api/embeddings", "Ollama's embedding of one text", _OLLAMA, _object(embedding={"type": "array"}), OllamaEmbeddingsBody),
    ApiOperation("get", "/api/tags", "The models, as Ollama lists them", _OLLAMA, _MODELS),
    ApiOperation("get", "/api/ps", "The models that are awake", _OLLAMA, _MODELS),
    ApiOperation("post", "/api/show", "One model", _OLLAMA, _object(details={"type": "object"}, capabilities={"type": "array"}), ModelBody),
    ApiOperation("post", "/api/pull", "Check whether a model is available", _OLLAMA, _object(status=_TEXT), ModelBody),
    ApiOperation("get", "/api/version", "The version of Ollama's API", _OLLAMA, _object(version=_TEXT)),
)  # fmt: skip

_ERRORS: dict[Dialect, Schema] = {
    _OPENAI: _object(error=_object(message=_TEXT, type=_TEXT, code=_TEXT)),
    _RESPONSES: _object(error=_object(message=_TEXT, type=_TEXT, code=_TEXT)),
    _ANTHROPIC: _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    _OLLAMA: _object(error=_TEXT),
    _NATIVE: _object(success={"const": False}, errors={"type": "array", "minItems": 1, "items": _object(
        code={"type": "integer"}, message=_TEXT)}),
}  # fmt: skip


@cache
def document(version: str) -> bytes:
    """Return the document as JSON."""
    kinds = [
        kind
        for each in OPERATIONS
        for told in (each.body, each.answer)
        for kind in _parts(told)
        if not isinstance(kind, dict)
    ]
    schemas, named = components(kinds, _REFERENCE)
    known = {id(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, known)
    return orjson.dumps({
        "openapi": "3.1.0",
        "info": {"title": "Pilotlight", "version": version},
        "components": {"schemas": named, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
        "paths": paths,
    })  # fmt: skip


def _parts(told: Any) -> tuple[Any, ...]:
    return () if told is None else told if isinstance(told, tuple) else (told,)


def _operation(each: ApiOperation, known: dict[int, Schema]) -> dict[str, Any]:
    def schema(told: Any) -> Schema:
        found = [part if isinstance(part, dict) else known[id(part)] for part in _parts(told)]
        return found[0] if len(found) == 1 else {"anyOf": found}

    content: dict[str, Any] = {"application/json": {"schema": schema(each.answer)}}
    if each.streams:
        is_lines = each.dialect is _OLLAMA
        content[LINES if is_lines else "text/event-stream"] = {"schema": schema(each.answer) if is_lines else _EVENT}
    failed = {"description": "Refused", "content": {"application/json": {"schema": _ERRORS[each.dialect]}}}
    found: dict[str, Any] = {
        "summary": each.summary,
        "responses": {"200": {"description": "Answered", "content": content}, "4XX": failed, "5XX": failed},
    }
    names = [part[1:-1] for part in each.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in names
    ]
    parameters += [{"name": name, "in": "query", "schema": form} for name, form in each.query]
    if parameters:
        found["parameters"] = parameters
    if each.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema(each.body)}}}
    return found


@cache
def page(version: str) -> bytes:
    """Return the document as a page of HTML, without a script."""
    told = orjson.loads(document(version))
    schemas = told["components"]["schemas"]
    rows = "".join(
        _section(path, method, each, schemas)
        for path, methods in told["paths"].items()
        for method, each in methods.items()
    )
    style = "body{font:15px/1.5 system-ui;max-width:60em;margin:2em auto}code{font-size:13px}td{padding:2px 1em 2px 0}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Pilotlight API</title><style>{style}</style>'
        f'<h1>Pilotlight API {escape(version)}</h1><p><a href="/openapi.json">/openapi.json</a> is the complete document.</p>{rows}</html>'
    ).encode()


def _section(path: str, method: str, each: dict[str, Any], schemas: dict[str, Schema]) -> str:
    body = each.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    fields = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td><code>{escape(_kind(schema))}</code></td>"
        f"<td>{'required' if name in struct.get('required', ()) else ''}</td></tr>"
        for struct in _structs(body, schemas)
        for name, schema in struct.get("properties", {}).items()
    )
    return (
        f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(each['summary'])}</p><table>{fields}</table>"
    )


def _structs(schema: Schema, schemas: dict[str, Schema]) -> list[Schema]:
    options = schema.get("anyOf", [schema])
    return [schemas[option["$ref"].rpartition("/")[2]] for option in options if "$ref" in option]


def _kind(schema: Schema) -> str:
    """Return a short description of a schema."""
    if "anyOf" in schema:
        return " | ".join(dict.fromkeys(_kind(option) for option in schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "enum" in schema:
        return " | ".join(msgspec.json.encode(value).decode() for value in schema["enum"])
    return str(schema.get("type", "any"))
