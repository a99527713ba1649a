"""A read-only view of the site's models for other modules: names, capabilities, residency, load."""

import time
from collections.abc import Mapping
from operator import attrgetter

from pilotlight.engine.api.protocol import ModelInfo, ModelLoad
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.runtime.models.adapters import SEPARATOR, is_name
from pilotlight.runtime.models.model_state import AwakeModel, ModelState, no_model
from pilotlight.runtime.models.text import TextSide
from pilotlight.sites.site import ModelConfig
from pilotlight.wire.hop.status import ModelStatus, Residency


class ModelRegistry:
    def __init__(self, states: Mapping[str, ModelState]) -> None:
        self.created = int(time.time())
        self._states = states
        self._names: dict[str, str] = {}
        self.refresh()

    def refresh(self, hidden: str = "") -> None:
        """Update the names after a change of the models.

        `hidden` is a model that takes no further requests."""
        found = [state for state in self._states.values() if state.name != hidden]
        self._names = {name: state.name for state in found for name in (state.name, *state.config.aliases)}

    @property
    def configs(self) -> list[ModelConfig]:
        return [state.config for state in self._states.values()]

    def named(self, name: str) -> str:
        """Return the main name of the model with this name or alias. Raises ApiError if there is none."""
        if (known := self.resolve(name)) is None:
            raise no_model(name)
        return known

    def resolve(self, name: str) -> str | None:
        """Return the main name of the model with this name or alias, or None. An adapter suffix is ignored.

        Does not check who may use the adapter."""
        known = self._names.get(name)
        if known is not None or SEPARATOR not in name:
            return known
        base, _, adapter = name.rpartition(SEPARATOR)
        return self._names.get(base) if is_name(adapter) else None

    def adapter_in(self, name: str) -> str:
        """Return the adapter's name at the end of a model name; empty if there is none."""
        return "" if name in self._names or self.resolve(name) is None else name.rpartition(SEPARATOR)[2]

    def names_of(self, name: str) -> list[str]:
        """Return all names of the same model: its own and its aliases, each with the adapter suffix of `name`."""
        behind = f"{SEPARATOR}{adapter}" if (adapter := self.adapter_in(name)) else ""
        own = self.resolve(name)
        return [known + behind for known, of in self._names.items() if of == own]

    def info(self, name: str) -> ModelInfo | None:
        return self._states[name].info

    def tokenizer(self, name: str) -> Tokenizer:
        """Return the tokenizer of a model that has been loaded once."""
        text = self._states[name].text
        assert text is not None, "an answer has deltas only once its model has been loaded"
        return text.tokenizer

    def text(self, name: str) -> TextSide | None:
        """Return the model's text side; None before its first load."""
        return self._states[name].text

    def takes_conversations(self, name: str) -> bool:
        """Return whether the model has a chat template; False before its first load."""
        text = self._states[name].text
        return text is not None and bool(text.template.sources)

    def pooled_models(self, *, scores: bool) -> list[str]:
        """Return the embedding models, or the models that score texts, as far as they have been loaded once."""
        known = [(state.name, state.info) for state in self._states.values() if state.info is not None]
        return [name for name, info in known if info.pooling and bool(info.labels) == scores]

    def residency(self, name: str) -> Residency:
        return self._states[name].residency

    def statuses(self) -> tuple[ModelStatus, ...]:
        return tuple(state.status() for state in self._states.values())

    def missing(self) -> list[str]:
        """Return a sentence for each pinned model of the site's file that is not awake or has a flaw."""
        return [
            f"model {state.name!r}: {state.detail or state.flaw or state.residency}"
            for state in self._states.values()
            if state.config.residency == "device" and not state.is_added and (not state.awake or state.flaw is not None)
        ]

    def load(self, name: str) -> ModelLoad | None:
        """Return the load of the model's least busy replica; None if it is not awake."""
        state = self._states.get(name)
        return min(state.loads, key=attrgetter("waiting_tokens"), default=None) if state is not None else None

    def kv_tokens(self, model: AwakeModel) -> int:
        """Return the capacity of the model's KV caches in tokens, without what other models use of it."""
        blocks = [load.total_blocks for load in self._states[model.info.name].loads] or [model.info.total_blocks]
        return sum(blocks) * model.info.block_size

    def has_waiting(self, name: str) -> bool:
        """Return whether sequences wait for room on every replica of the model."""
        state = self._states.get(self._names.get(name, ""))
        awake = state.awake if state is not None else ()
        return bool(awake) and all(replica.load.waiting > 0 for replica in awake)
