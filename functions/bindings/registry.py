"""The kinds of bindings, and the open bindings of one function."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pilotlight.functions.bindings.ai import AI
from pilotlight.functions.bindings.analytics import AnalyticsEngine
from pilotlight.functions.bindings.assets.asset_files import Assets
from pilotlight.functions.bindings.binding import Binding, BindingError, Body, Services
from pilotlight.functions.bindings.model_service import ModelService
from pilotlight.functions.bindings.objects.durable_objects import DurableObjects
from pilotlight.functions.bindings.queues import QueueProducer
from pilotlight.functions.bindings.rate_limit import RateLimit
from pilotlight.functions.bindings.secrets.stored_secret import StoredSecret
from pilotlight.functions.bindings.service_binding import Service
from pilotlight.functions.bindings.storage.d1 import D1Database
from pilotlight.functions.bindings.storage.kv import KVNamespace
from pilotlight.functions.bindings.storage.r2 import R2Bucket
from pilotlight.functions.bindings.vectorize import Vectorize
from pilotlight.functions.bindings.worker_loader import WorkerLoader
from pilotlight.functions.channel.frames import BindingCall
from pilotlight.functions.manifest import BindingDeclaration

Opener = Callable[[BindingDeclaration, Path, Services], Binding]
OPENERS: dict[str, Opener] = {
    "ai": AI.open,
    "kv": KVNamespace.open,
    "d1": D1Database.open,
    "r2": R2Bucket.open,
    "queue_producer": QueueProducer.open,
    "rate_limit": RateLimit.open,
    "assets": Assets.open,
    "service": lambda declaration, state_dir, services: _service(declaration, state_dir, services),
    "durable_object": DurableObjects.open,
    "workflow": DurableObjects.open,
    "worker_loader": WorkerLoader.open,
    "analytics_engine": AnalyticsEngine.open,
    "vectorize": Vectorize.open,
    "secrets_store": StoredSecret.open,
}
VALUES = ("var", "secret", "hyperdrive", "not_offered")  # kinds that the function gets as plain values


def open_binding(declaration: BindingDeclaration, state_dir: Path, services: Services) -> Binding:
    opener = OPENERS.get(declaration.kind)
    if opener is None:
        raise BindingError(
            f"bindings of the kind {declaration.kind!r} are not offered; offered are {', '.join(OPENERS)}"
        )
    return opener(declaration, state_dir, services)


def _service(declaration: BindingDeclaration, state_dir: Path, services: Services) -> Binding:
    """Open a service binding to a function of this site or, if its name begins with "@", to a model."""
    service = declaration.options["service"]
    if not service.startswith("@"):
        return Service.open(declaration, state_dir, services)
    if services.inference is None:
        raise BindingError(f"{declaration.name}: the site has no models; add a [[models]] table to its file")
    return ModelService(service, services)


class Bindings:
    """All open bindings of one function."""

    def __init__(self, declarations: Iterable[BindingDeclaration], state_dir: Path, services: Services) -> None:
        self._bindings = {
            declaration.name: open_binding(declaration, state_dir, services)
            for declaration in declarations
            if declaration.kind not in VALUES
        }

    async def answer(self, call: BindingCall, body: Body | None = None) -> Any:
        """Answer a binding call that came over the function's channel. Raises BindingError."""
        binding = self._bindings.get(call.binding)
        if binding is None:
            raise BindingError(f"there is no binding {call.binding!r}", code="no_such_binding", name="TypeError")
        return await binding.call(call.method, call.args, call.kwargs, body)

    def get(self, name: str) -> Binding | None:
        """Return an open binding by name; None if there is none."""
        return self._bindings.get(name)

    async def close(self) -> None:
        for binding in self._bindings.values():
            await binding.close()
