"""What a function imports: the `workers` module of Cloudflare's Python Workers, for CPython processes."""

from workers.entrypoint import Context, DurableObject, WorkerEntrypoint, handler, python_from_rpc, python_to_rpc
from workers.forms import Blob, File, FormData
from workers.headers import Headers
from workers.host import env
from workers.outbound import fetch
from workers.request import Request
from workers.response import Response
from workers.websockets import WebSocket, WebSocketPair, WebSocketRequestResponsePair

__all__ = [
    "Blob",
    "Context",
    "DurableObject",
    "File",
    "FormData",
    "Headers",
    "Request",
    "Response",
    "WebSocket",
    "WebSocketPair",
    "WebSocketRequestResponsePair",
    "WorkerEntrypoint",
    "env",
    "fetch",
    "handler",
    "python_from_rpc",
    "python_to_rpc",
]
