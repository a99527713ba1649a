"""A model that a host serves, however it is computed."""

from typing import TYPE_CHECKING, Protocol

from pilotlight.engine.api.protocol import ModelSpec

if TYPE_CHECKING:
    from pilotlight.engine.core.engine import Engine


class ServedModel(Protocol):
    @property
    def spec(self) -> ModelSpec: ...

    @property
    def engine(self) -> "Engine": ...

    def close(self) -> None:
        """End a model that is no longer used."""
