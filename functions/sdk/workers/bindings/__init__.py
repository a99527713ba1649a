"""The objects that functions use as `self.env.NAME`, made from a manifest's declarations.

The runtime does their work.
"""

from typing import Any

from workers.bindings.ai import AI
from workers.bindings.d1 import D1Database
from workers.bindings.durable_objects import DurableObjectNamespace
from workers.bindings.kv import KVNamespace
from workers.bindings.queues import Queue
from workers.bindings.r2 import R2Bucket
from workers.bindings.rate_limit import RateLimit
from workers.bindings.service import Fetcher, Service
from workers.bindings.small import AnalyticsEngine, Hyperdrive, NotOffered, StoredSecret
from workers.bindings.vectorize import Vectorize
from workers.bindings.worker_loader import WorkerLoader
from workers.bindings.workflow import Workflow
from workers.face import Channel, as_record

FACES: dict[str, type[Any]] = {
    "ai": AI,
    "kv": KVNamespace,
    "d1": D1Database,
    "r2": R2Bucket,
    "queue_producer": Queue,
    "rate_limit": RateLimit,
    "assets": Fetcher,
    "service": Service,
    "durable_object": DurableObjectNamespace,
    "workflow": Workflow,
    "worker_loader": WorkerLoader,
    "analytics_engine": AnalyticsEngine,
    "vectorize": Vectorize,
    "secrets_store": StoredSecret,
    "hyperdrive": Hyperdrive,
    "not_offered": NotOffered,
}


def open_face(channel: Channel, kind: str, name: str, options: dict[str, Any]) -> Any:
    """Return the object for `env.NAME`; vars and secrets are plain values."""
    if kind in ("var", "secret"):
        return as_record(options["value"])
    return FACES[kind](channel, name, options)
