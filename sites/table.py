"""Tables of configuration files: frozen values with units in their names, and rules that types cannot express."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

Rules = Mapping[str, Callable[[Any], None]]  # by field

SIZES, MOST = ("_gib", "_mib"), 1e9  # the ends of their fields' names, and what none of them reaches


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of a file. Beyond the types, `rules` judge one field each and `agree` all of them together; both raise ValueError."""

    rules: ClassVar[Rules] = {}

    def __post_init__(self) -> None:
        for field, rule in self.rules.items():
            rule(getattr(self, field))
        for field in self.__struct_fields__:
            if field.endswith(SIZES) and (getattr(self, field) or 0) > MOST:
                raise ValueError(f"{field} is more than any machine has: leave it out, or name a size")
        self.agree()

    def agree(self) -> None:
        """Judge fields that are right each by itself. Raises ValueError."""
