"""The package that functions import: Cloudflare's `workers` for Python, in CPython processes."""

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
from workers.host import env, patch_env
from workers.http.forms import Blob, File, FormData
from workers.http.headers import Headers
from workers.http.outbound import fetch
from workers.http.request import Request
from workers.http.response import Response
from workers.remote.stubs import RpcStub, RpcTarget
from workers.sockets.websockets import WebSocket, WebSocketPair, WebSocketRequestResponsePair
from workers.types import BlobEnding, BlobValue, Body, FetchKwargs, FormDataValue, JSBody, RequestInitCfProperties
from workers.utils import import_from_javascript

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
