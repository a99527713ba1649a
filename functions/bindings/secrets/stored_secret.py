"""Secrets store: secrets of this site that several functions share.

A secret is decrypted each time a function asks for it, so changes take effect at once.
"""

import asyncio
from pathlib import Path

from pilotlight.functions.bindings.binding import Binding, BindingError, Nothing, Services, method
from pilotlight.functions.bindings.secrets.secret_store import SecretError, SecretStore
from pilotlight.functions.manifest import BindingDeclaration

OWNER = "store:"  # prefix of a store's id where SecretStore expects a function's name


class StoredSecret(Binding):
    kind = "secrets_store"

    def __init__(self, store: SecretStore, store_id: str, name: str) -> None:
        self._store = store
        self._store_id = store_id
        self._name = name

    @classmethod
    def open(cls, declaration: BindingDeclaration, state_dir: Path, services: Services) -> "StoredSecret":
        options = declaration.options
        return cls(SecretStore(state_dir), options["store_id"], options["secret_name"])

    @method
    async def get(self, request: Nothing) -> str:
        try:
            values = await asyncio.to_thread(self._store.values, f"{OWNER}{self._store_id}")
        except SecretError as error:
            raise BindingError(str(error), status=500) from None
        if self._name not in values:
            put = f"pilotlight secret put {self._store_id} {self._name} --store"
            raise BindingError(
                f"the store {self._store_id!r} has no secret {self._name!r}; `{put}` puts it", status=404
            )
        return values[self._name]
