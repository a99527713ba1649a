"""A server's stored answer for commands that print it."""

from typing import Any

from pilotlight.runtime.cli.api import Api


class StoredApi(Api):
    """An API that gives the same answer to each request, and records the paths that are requested."""

    def __init__(self, told: Any, text: str = "") -> None:
        super().__init__("http://127.0.0.1:1")
        self.asked: list[str] = []
        self._told = told
        self._text = text

    def get_json(self, path: str) -> Any:
        self.asked.append(path)
        return self._told

    def get_text(self, path: str) -> str:
        self.asked.append(path)
        return self._text
