"""Typed access to a GGUF file's metadata; errors name key and value."""

import math
import struct
from collections.abc import Mapping
from typing import Any

from pilotlight.engine.api.errors import CheckpointError


class Metadata:
    """The metadata of one file. "{arch}" in a key is a placeholder for the architecture."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.origin = origin
        self._values = values
        self._read: set[str] = set()
        self.architecture = self.text("general.architecture")

    def keys(self, prefix: str) -> list[str]:
        prefix = self._key(prefix)
        return [key for key in self._values if key.startswith(prefix)]

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._of_type(key, default, "a text", str))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._of_type(key, default, "true or false", bool))

    def integer(self, key: str, default: int | None = None, skips_zeros: bool = False) -> int:
        """Return a whole number. `skips_zeros`: of a list with one number per layer, zeros do not count."""
        found = self._find(key, default)
        if isinstance(found, list) and skips_zeros:
            found = [each for each in found if each != 0]
        if isinstance(found, list) and found and found.count(found[0]) == len(found):
            found = found[0]  # the file has a list of equal values, one per layer
        if isinstance(found, list):
            raise self._refusal(key, f"{found[:3]}...", "one number for all layers")
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise self._refusal(key, found, "a whole number")
        return found

    def positive(self, key: str, default: int | None = None) -> int:
        if not (found := self.integer(key, default)):
            raise self._refusal(key, found, "a positive whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self._find(key, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
            raise self._refusal(key, found, "a number")
        return shortest(found)

    def texts(self, key: str) -> list[str]:
        return self._list(key, str, "a list of texts")

    def flags(self, key: str) -> list[bool]:
        found = self._list(key, int, "a list of true and false")  # some files have 1 and 0
        if not set(found) <= {0, 1}:
            raise self._refusal(key, f"{found[:3]}...", "a list of true and false")
        return list(map(bool, found))

    def per_layer(self, key: str, num_layers: int, least: int = 1) -> list[int]:
        """Return a whole number for each layer; the file has a list, or one number for all."""
        found = self._find(key, None)
        if isinstance(found, int):
            return [self.positive(key) if least else self.integer(key)] * num_layers
        numbers = self.integers(key)
        if len(numbers) < num_layers or min(numbers, default=least) < least:
            kind = "positive" if least else "whole"
            raise self._refusal(key, f"{numbers[:3]}...", f"a {kind} number for each of {num_layers} layers")
        return numbers[:num_layers]

    def integers(self, key: str) -> list[int]:
        return self._list(key, int, "a list of whole numbers")

    def numbers(self, key: str) -> list[float]:
        return self._list(key, float, "a list of numbers")

    def numbers_per_layer(self, key: str, num_layers: int) -> list[float]:
        """Return a number for each layer; the file has a list, or one number for all."""
        found = self._find(key, None)
        numbers = self.numbers(key) if isinstance(found, list) else [self.number(key)] * num_layers
        if len(numbers) < num_layers:
            raise self._refusal(key, f"{numbers[:3]}...", f"a number for each of {num_layers} layers")
        return numbers

    def unread(self, key: str) -> Any:
        """Return the value of a key that has not been read; None if the key was read or is missing."""
        key = self._key(key)
        return None if key in self._read else self._values.get(key)

    def __contains__(self, key: str) -> bool:
        return self._key(key) in self._values

    def _find(self, key: str, default: Any) -> Any:
        key = self._key(key)
        self._read.add(key)
        return self._values.get(key, default)

    def _of_type(self, key: str, default: Any, what: str, wanted: type) -> Any:
        found = self._find(key, default)
        if not isinstance(found, wanted):
            raise self._refusal(key, found, what)
        return found

    def _list(self, key: str, of: type, what: str) -> list[Any]:
        found = self._find(key, None)
        if not isinstance(found, list) or not all([isinstance(one, of) for one in found]):
            raise self._refusal(key, type(found).__name__, what)
        return found

    def _key(self, key: str) -> str:
        return key.replace("{arch}", self.architecture) if "{" in key else key

    def _refusal(self, key: str, found: Any, what: str) -> CheckpointError:
        key = self._key(key)
        if found is None:
            return CheckpointError(f"{self.origin} lacks the metadata {key}")
        return CheckpointError(f"{self.origin} has {key} = {found!r}; it must be {what}")


def shortest(value: float) -> float:
    """Return the shortest decimal number that is equal in fp32: 1e-05 for 9.999999747378752e-06."""
    if abs(value) > 1e38:  # rounding might exceed fp32's range
        return value
    as_stored = struct.pack("<f", value)
    for digits in range(1, 9):
        found = float(f"{value:.{digits}g}")
        if struct.pack("<f", found) == as_stored:
            return found
    return value
