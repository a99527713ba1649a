"""What a function imports: the `workers` module of Cloudflare's Python Workers, for CPython processes."""

from workers.entrypoint import (
    Context,
    DurableObject,
    WorkerEntrypoint,
    WorkflowEntrypoint,
    handler,
    python_from_rpc,
    python_to_rpc,
    wait_until,
)
from workers.forms import Blob, File, FormData
from workers.headers import Headers
from workers.host import env, patch_env
from workers.outbound import fetch
from workers.request import Request
from workers.response import Response
from workers.stubs import RpcStub, RpcTarget
from workers.types import BlobEnding, BlobValue, Body, FetchKwargs, FormDataValue, JSBody, RequestInitCfProperties
from workers.utils import import_from_javascript
from workers.websockets import WebSocket, WebSocketPair, WebSocketRequestResponsePair

FetchResponse = Response
waitUntil = wait_until

__all__ = [
    "Blob",
    "BlobEnding",
    "BlobValue",
    "Body",
    "Context",
    "DurableObject",
    "FetchKwargs",
    "FetchResponse",
    "File",
    "FormData",
    "FormDataValue",
    "Headers",
    "JSBody",
    "Request",
    "RequestInitCfProperties",
    "Response",
    "RpcStub",
    "RpcTarget",
    "WebSocket",
    "WebSocketPair",
    "WebSocketRequestResponsePair",
    "WorkerEntrypoint",
    "WorkflowEntrypoint",
    "env",
    "fetch",
    "handler",
    "import_from_javascript",
    "patch_env",
    "python_from_rpc",
    "python_to_rpc",
    "waitUntil",
    "wait_until",
]
